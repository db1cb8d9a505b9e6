"""Choosing the next tokens of a step, all rows at once.

Owns Sampler and the order of the chain, llama.cpp's: biases and penalties, grammar mask, top-k,
typical, top-p, min-p, temperature, draw. A sample depends only on the request's seed and
parameters, the position and the logits (I9), never on what else is in the batch: `candidates` says
how. Draws come from a counter-based generator on the host; nothing is kept between calls. Runs
outside prompt graphs. Does not know schedules, and does not write to the logits.

What reaches the device is one copy, what comes back is one copy, and the number of kernels does
not grow with the batch: a batch of greedy rows with nothing else asked is one argmax.
"""

# S rows, V vocabulary, W words of a mask (V / 32, rounded up), K candidates kept

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from graphseed.capture.errors import GraphseedError
from graphseed.engine import candidates, logprobs, penalties
from graphseed.engine.errors import BadParameter, NotFinite, NothingAllowed, RequestError
from graphseed.engine.request import SamplingParams

_GREEDY: Final = SamplingParams()
_NUM_COLUMNS: Final = 6  # of a row's parameters on the device


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of the logits is sampled by."""

    params: SamplingParams
    position: int  # of the token that the logits follow
    token_ids: Sequence[int] = ()  # prompt and answer so far; read only when penalties ask
    grammar_mask: torch.Tensor | None = None  # [W] int32 on the device: bit set, token allowed


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one row came to. With an error the token is -1, and the other rows are not concerned."""

    token: int
    logprob: float | None = None  # natural log; only when params.num_logprobs asks
    top: tuple[tuple[int, float], ...] = ()  # token ids and log-probabilities, best first
    error: GraphseedError | None = None


class Sampler:
    """Chooses tokens for one vocabulary on one device. Owned by the engine; engine thread only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = torch.empty(0, device=device).device  # with its index

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Choose a token for each of `rows`, from the first rows of logits [S_cap, V] float32.

        Waits for the device once. A row that cannot be sampled says so in `Sampled.error`:
        NotFinite, NothingAllowed, BadParameter (biased token, mask) or BadToken (`token_ids`).
        """
        if not rows:
            return []
        if len(rows) > len(logits) or logits.shape[1] != self._vocab_size:
            raise BadParameter(
                "the shape of logits",
                tuple(logits.shape),
                f"at least {len(rows)} rows of {self._vocab_size}",
            )
        if logits.dtype != torch.float32 or logits.device != self._device:
            raise BadParameter(
                "logits", f"{logits.dtype} on {logits.device}", f"torch.float32 on {self._device}"
            )
        logits = logits[: len(rows)]
        if all(_is_plain(row) for row in rows):
            return _best(logits, rows)
        return _Batch(self._vocab_size, self._device, rows).sample(logits)


def _is_plain(row: SampleRow) -> bool:
    """Whether nothing but the best token is asked for."""
    params = row.params
    return (
        params.is_greedy
        and not params.num_logprobs
        and not params.logit_bias
        and row.grammar_mask is None
        and not params.has_penalties
    )


def _best(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """The first best token of each row: one reduction, and one copy to the host."""
    best, ids = logits.max(dim=1)  # of a row with a NaN it is NaN
    # float32 holds the ids of every vocabulary below 2**24.
    values, tokens = torch.stack((best, ids.float())).tolist()
    return [
        Sampled(int(token))
        if math.isfinite(value)
        else Sampled(-1, error=NotFinite(row.position, value))
        for value, token, row in zip(values, tokens, rows, strict=True)
    ]


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    position: int,
    token_ids: Sequence[int] | None = None,
) -> int:
    """Choose the token that follows `position`, from its logits [V] float32: a batch of one.

    Waits for the device. Raises what `Sampler.sample` reports, and BadParameter when penalties are
    asked for and `token_ids` (prompt and answer so far) is not given.
    """
    if token_ids is None and params.has_penalties:
        raise BadParameter("token_ids", token_ids, "the tokens so far, which the penalties read")
    row = SampleRow(params, position, token_ids or ())
    (sampled,) = Sampler(len(logits), logits.device).sample(logits[None], [row])
    if sampled.error is not None:
        raise sampled.error
    return sampled.token


class _Batch:
    """One call's rows: what is sent to the device, what is asked of it, what comes back."""

    def __init__(self, vocab_size: int, device: torch.device, rows: Sequence[SampleRow]) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows = rows
        self._bits = candidates.fixed_point_bits(vocab_size)
        self._params: list[SamplingParams] = []
        self._errors: list[GraphseedError | None] = []
        self._edits: list[list[penalties.Edit]] = []
        self._masks: list[torch.Tensor | None] = []
        for row in rows:
            self._add(row)
        self._drawn = [params for params in self._params if not params.is_greedy]
        self._num_top = min(max(params.num_logprobs for params in self._params), vocab_size)

    def sample(self, logits: torch.Tensor) -> list[Sampled]:
        """Sample logits [S, V]."""
        table, edits = self._send()
        usable = logits
        if edits.numel():
            usable = penalties.apply(usable, edits)
        if any(mask is not None for mask in self._masks):
            usable = self._masked(usable)
        if self._drawn:
            best, ids = self._draw(usable, table)
        else:
            best, ids = usable.max(dim=1, keepdim=True)  # of equal ones the first
        # Of the raw logits, so that no mask hides a NaN: the largest of a row with one is NaN.
        is_plain = usable is logits and not self._drawn
        raw_best = best if is_plain else logits.amax(1, keepdim=True)
        columns = [ids, raw_best, best]
        if self._num_top:
            columns += [logits.gather(1, ids)]
            columns += logprobs.columns(logits, raw_best, self._num_top)
        results = torch.cat([column.double() for column in columns], dim=1).tolist()
        return [self._read(index, result) for index, result in enumerate(results)]

    def _add(self, row: SampleRow) -> None:
        """Take one row in; what is wrong with it is reported in its place."""
        edits: list[penalties.Edit] = []
        error: GraphseedError | None = None
        try:
            edits = penalties.edits_of(row.params, row.token_ids, self._vocab_size)
            self._check_mask(row.grammar_mask)
        except RequestError as wrong:
            error = wrong
        self._errors.append(error)
        self._params.append(row.params if error is None else _GREEDY)
        self._edits.append(edits if error is None else [])
        self._masks.append(row.grammar_mask if error is None else None)

    def _check_mask(self, mask: torch.Tensor | None) -> None:
        if mask is None:
            return
        want = ((-(-self._vocab_size // 32),), torch.int32, self._device)
        if (tuple(mask.shape), mask.dtype, mask.device) != want:
            raise BadParameter(
                "a grammar mask",
                f"{tuple(mask.shape)} {mask.dtype} on {mask.device}",
                f"{want[0]} {want[1]} on {want[2]}",
            )

    def _send(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters [columns, S, 1] and edits [fields, N] on the device, by one copy."""
        num_rows = len(self._rows) if self._drawn else 0
        columns = [self._columns(index) for index in range(num_rows)]
        table = np.array(columns, dtype=np.float64).reshape(num_rows, _NUM_COLUMNS).T
        flat = np.concatenate((table.ravel(), penalties.pack(self._edits).ravel()))
        sent = torch.from_numpy(flat)
        if self._device.type != "cpu" and flat.size:
            # Pinned: a copy from other memory would wait for the step.
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        return (
            sent[: table.size].view(_NUM_COLUMNS, num_rows, 1),
            sent[table.size :].view(penalties.NUM_FIELDS, -1),
        )

    def _columns(self, index: int) -> tuple[float, ...]:
        params = self._params[index]
        if params.is_greedy:  # one candidate: whatever is drawn is the best
            return 1, 1.0, 1.0, -math.inf, 1.0, 0.0
        uniform = _uniform(params.seed, self._rows[index].position)
        log_min_p = math.log(params.min_p) if params.min_p else -math.inf
        num = self._num_candidates(params)
        return num, params.typical_p, params.top_p, log_min_p, params.temperature, uniform

    def _num_candidates(self, params: SamplingParams) -> int:
        return min(params.top_k or self._vocab_size, self._vocab_size)

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [S, V] with -inf for what a row's grammar forbids."""
        num_words = -(-self._vocab_size // 32)
        all_allowed = torch.full((num_words,), -1, dtype=torch.int32, device=self._device)
        masks = [all_allowed if mask is None else mask for mask in self._masks]
        ids = torch.arange(self._vocab_size, dtype=torch.int32, device=self._device)
        words = torch.stack(masks).index_select(1, ids >> 5)
        return logits.masked_fill((words >> (ids & 31)) & 1 == 0, -math.inf)

    def _draw(self, logits: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best logit and the token drawn, [S, 1] each."""
        top_k, typical_p, top_p, log_min_p, temperature, uniform = table
        num = max(self._num_candidates(params) for params in self._drawn)
        values, ids = candidates.rank(logits, num)
        left = candidates.keep_top_k(values, top_k)
        if any(params.typical_p < 1.0 for params in self._drawn):
            left = candidates.keep_typical(left, typical_p, self._bits)
        if any(params.top_p < 1.0 for params in self._drawn):
            left = candidates.keep_top_p(left, top_p, self._bits)
        if any(params.min_p > 0.0 for params in self._drawn):
            left = candidates.keep_min_p(left, log_min_p)
        weights = candidates.weigh(left, self._bits, temperature)
        return values[:, :1], ids.gather(1, candidates.pick(weights, uniform))

    def _read(self, index: int, result: list[float]) -> Sampled:
        """One row of what came back."""
        token, raw_best, best = result[:3]
        position, num_logprobs = self._rows[index].position, self._params[index].num_logprobs
        error = self._errors[index]
        if error is None and not math.isfinite(raw_best):
            error = NotFinite(position, raw_best)
        if error is None and best == -math.inf:
            error = NothingAllowed(position)
        if error is not None:
            return Sampled(-1, error=error)
        if not num_logprobs:
            return Sampled(int(token))
        logit, weight = result[3:5]
        values, ids = result[5 : 5 + self._num_top], result[5 + self._num_top :]
        logprob = logprobs.logprob_of(logit, raw_best, weight, self._vocab_size)
        top = logprobs.top_of(
            values[:num_logprobs], ids[:num_logprobs], raw_best, weight, self._vocab_size
        )
        return Sampled(int(token), logprob, top)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1), of 53 bits, that depends on its arguments alone."""
    raw: npt.NDArray[np.uint64] = np.random.Philox(key=seed, counter=position).random_raw(1)
    return float(raw[0] >> np.uint64(11)) * 2.0**-53
