"""Choosing the next token.

Owns `sample`. A sample depends only on the request's seed, the position and the logits (I9): every
draw comes from a counter-based generator keyed by those, and nothing is kept between calls. Runs
outside prompt graphs.
"""

# V vocabulary, K candidates kept

import numpy as np
import numpy.typing as npt
import torch

from graphseed.engine.errors import NotFinite
from graphseed.engine.request import SamplingParams


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Choose the token that follows `position`, from its logits [V] float32 on any device.

    The order is llama.cpp's: top-k, top-p, min-p, then temperature. Waits for the device. Raises
    NotFinite when the best logit is no number.
    """
    if params.temperature == 0.0:
        best = torch.argmax(logits)
        value, token = torch.stack((logits[best].double(), best.double())).tolist()
        _require_finite(value, position)
        return int(token)
    values, token_ids = _candidates(logits, params.top_k)
    _require_finite(values[0], position)
    kept = _filter(values, params)
    with np.errstate(over="ignore"):  # the smallest temperatures give -inf, a weight of 0
        weights = _softmax((values[:kept] - values[0]) / params.temperature)
    point = _uniform(params.seed, position) * float(weights.sum())
    index = int(np.searchsorted(np.cumsum(weights), point, side="right"))
    return int(token_ids[min(index, kept - 1)])


def _candidates(
    logits: torch.Tensor, top_k: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The K best logits in falling order, and their ids; equal ones by rising id."""
    if top_k and top_k < len(logits):
        best = torch.topk(logits, top_k)
        values, ids = best.values.double().cpu().numpy(), best.indices.cpu().numpy()
        order = np.lexsort((ids, -values))
        return values[order], ids[order]
    every = torch.sort(logits, descending=True, stable=True)
    return every.values.double().cpu().numpy(), every.indices.cpu().numpy()


def _require_finite(best: float, position: int) -> None:
    if not np.isfinite(best):
        raise NotFinite(position, best)


def _filter(values: npt.NDArray[np.float64], params: SamplingParams) -> int:
    """How many of the falling candidates top-p and then min-p keep; at least one."""
    weights = _softmax(values)
    kept = len(values)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(np.cumsum(weights), params.top_p, side="left")) + 1
        kept = min(kept, len(values))
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(weights >= params.min_p * weights[0])))
    return max(kept, 1)


def _softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
