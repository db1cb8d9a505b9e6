"""What a request adds to or takes from single logits: biases and penalties for repeating.

Owns Edits. Each (row, token) is edited once, so the order of writes is nobody's concern. Does not
know how tokens are chosen.
"""

# N edits, S rows, V vocabulary

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from graphseed.engine.errors import BadParameter, BadToken
from graphseed.engine.request import SamplingParams

NUM_FIELDS = 5  # row, token, bias, factor, reduction
_FORCING = 1e30  # a summed bias goes no further: two tokens forced at once stay equals
_MAX_LOGIT = float(np.finfo(np.float32).max)

Edit = tuple[int, float, float, float]  # token, bias, factor, reduction


def edits_of(params: SamplingParams, token_ids: Sequence[int], vocab_size: int) -> list[Edit]:
    """A row's edits, one for each token concerned. `token_ids`: prompt and answer so far.

    Raises BadParameter for a biased token that the vocabulary does not have, and BadToken for one
    of `token_ids`.
    """
    biases = _biases(params, vocab_size)
    counts = _recent(params, token_ids, vocab_size)
    return [
        (
            token,
            biases.get(token, 0.0),
            params.repeat_penalty if count else 1.0,
            count * params.frequency_penalty + bool(count) * params.presence_penalty,
        )
        for token in biases.keys() | counts.keys()
        for count in (counts.get(token, 0),)
    ]


def check_biases(params: SamplingParams, vocab_size: int) -> None:
    """Raise BadParameter for a biased token that the vocabulary does not have."""
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadParameter(
                "a token id of logit_bias", token, f"0 to {vocab_size - 1}, the model's ids"
            )


def pack(rows: Iterable[list[Edit]]) -> npt.NDArray[np.float64]:
    """All rows' edits as [NUM_FIELDS, N]."""
    flat = [(row, *edit) for row, edits in enumerate(rows) for edit in edits]
    return np.array(flat, dtype=np.float64).reshape(-1, NUM_FIELDS).T


def apply(logits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """A copy of `logits` [S, V] float32 with the edits [NUM_FIELDS, N] float64 made.

    As llama.cpp does: the bias is added, then what is above 0 is divided by the repeat penalty and
    what is not is multiplied by it, then presence and frequency penalties are taken off.
    """
    rows, tokens = packed[:2].long()
    bias, factor, reduction = packed[2:]
    values = logits[rows, tokens].double() + bias
    values = torch.where(values > 0, values / factor, values * factor) - reduction
    # A float32 may not hold what was asked for; +inf would read as a fault of the model.
    return logits.index_put((rows, tokens), values.clamp_(max=_MAX_LOGIT).float())


def _biases(params: SamplingParams, vocab_size: int) -> dict[int, float]:
    check_biases(params, vocab_size)
    sums: dict[int, float] = {}
    for token, bias in params.logit_bias:
        total = sums.get(token, 0.0) + bias
        sums[token] = total if total == -np.inf else min(max(total, -_FORCING), _FORCING)
    return sums


def _recent(params: SamplingParams, token_ids: Sequence[int], vocab_size: int) -> Counter[int]:
    """How often each of the last `repeat_last_n` tokens occurs among them."""
    if not params.has_penalties:
        return Counter()
    last = params.repeat_last_n
    counts = Counter(token_ids if last < 0 else token_ids[-last:])
    for token in counts:
        if not 0 <= token < vocab_size:
            # On a device it would read another row, or end the context.
            raise BadToken(list(token_ids).index(token), token, vocab_size)
    return counts
