"""One request: what was asked, where it stands, what came out.

Owns SamplingParams, Request and its status machine. Does not know the device or how steps run.
"""

import operator
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from numbers import Integral, Real
from types import UnionType
from typing import Final, Self

import numpy as np

from graphseed.capture.errors import IllegalMove
from graphseed.engine.errors import BadParameter, BadToken, EmptyPrompt, PromptTooLong
from graphseed.engine.grammar import Grammar

_MANY_IDS: Final = 1024  # from here on numpy is faster


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # admitted, no chunk submitted
    PREFILL = "prefill"  # some chunks submitted
    DECODE = "decode"  # producing tokens
    FINISHED = "finished"
    FAILED = "failed"  # ended by an error or given up by its reader


EDGES: Final[dict[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.FAILED}),
    Status.PREFILL: frozenset({Status.DECODE, Status.FINISHED, Status.FAILED}),
    Status.DECODE: frozenset({Status.FINISHED, Status.FAILED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
}


class Pooling(Enum):
    """What becomes of a prompt's hidden states where an embedding or a score is asked for."""

    MEAN = "mean"
    CLS = "cls"  # the first token's
    LAST = "last"
    NONE = "none"  # every token's


class FinishReason(Enum):
    """Why an answer ended."""

    END_OF_SEQUENCE = "eos"
    STOP_STRING = "word"
    MAX_TOKENS = "limit"
    CONTEXT_FULL = "context"


_MAX: Final = sys.float_info.max
_TINY: Final = sys.float_info.min * sys.float_info.epsilon  # the smallest number above 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises BadParameter for a value out of range.

    Every default but `max_tokens` is neutral. The engine knows the vocabulary, and checks the
    biased tokens against it when the request is made.
    """

    temperature: float = 0.0  # 0: greedy, and the filters below are not asked
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # with the position, decides every draw
    max_tokens: int = 128  # new tokens; -1: until the context is full
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    typical_p: float = 1.0
    # The three penalties look at the last `repeat_last_n` tokens of prompt and answer.
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64  # -1: all, 0: none
    logit_bias: tuple[tuple[int, float], ...] = ()  # -inf: never; a token named twice gets the sum
    num_logprobs: int = 0  # most likely tokens to report with each token; 0: none

    def __post_init__(self) -> None:
        self._require_whole()
        self._require_in_range()
        # One string is a sequence of strings too: each letter would end the answer.
        are_texts = _is_a(self.stop, tuple | list) and all(_is_a(s, str) for s in self.stop)
        if not are_texts or not all(self.stop):
            raise BadParameter("stop", self.stop, "a tuple of non-empty strings")
        for entry in self.logit_bias:
            if not _is_bias(entry):
                raise BadParameter(
                    "logit_bias", entry, "pairs of a token id and a number (-inf: never)"
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken and nothing is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the choice."""
        is_neutral = (
            self.repeat_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
        )
        return self.repeat_last_n != 0 and not is_neutral

    def _require_whole(self) -> None:
        for name, value in (
            ("top_k (--top-k)", self.top_k),
            ("max_tokens (-n)", self.max_tokens),
            ("seed (-s)", self.seed),
            ("repeat_last_n", self.repeat_last_n),
            ("num_logprobs", self.num_logprobs),
        ):
            if not _is_whole(value):
                raise BadParameter(name, value, "a whole number")

    def _require_in_range(self) -> None:
        bounds = (
            ("temperature (--temp)", self.temperature, 0.0, _MAX, "0 or more"),
            ("top_k (--top-k)", self.top_k, 0, _MAX, "0 (all) or more"),
            ("top_p (--top-p)", self.top_p, _TINY, 1.0, "above 0, at most 1"),
            ("min_p (--min-p)", self.min_p, 0.0, 1.0, "0 to 1"),
            ("seed (-s)", self.seed, 0, (1 << 64) - 1, "0 to 2**64 - 1"),
            ("typical_p", self.typical_p, _TINY, 1.0, "above 0, at most 1"),
            ("repeat_penalty", self.repeat_penalty, _TINY, 1e6, "above 0, at most 1e6"),
            ("presence_penalty", self.presence_penalty, -1e6, 1e6, "-1e6 to 1e6"),
            ("frequency_penalty", self.frequency_penalty, -1e6, 1e6, "-1e6 to 1e6"),
            ("repeat_last_n", self.repeat_last_n, -1, _MAX, "-1 (all), 0 (none) or more"),
            ("num_logprobs", self.num_logprobs, 0, _MAX, "0 (none) or more"),
        )
        for name, value, low, high, expected in bounds:
            if not _is_real(value) or not low <= value <= high:
                raise BadParameter(name, value, expected)
        if self.max_tokens < -1 or self.max_tokens == 0:
            raise BadParameter("max_tokens (-n)", self.max_tokens, "-1 (no limit) or at least 1")


def _is_a(value: object, kind: type | UnionType) -> bool:
    """Whether a value is what its annotation says: parameters come from outside too."""
    return isinstance(value, kind)


def _is_whole(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)  # the abstract class takes its time


def _is_real(value: object) -> bool:
    return type(value) in (int, float) or isinstance(value, Real)


def _is_bias(entry: tuple[int, float]) -> bool:
    if not _is_a(entry, tuple | list) or len(entry) != 2:
        return False
    token, bias = entry
    if not _is_whole(token) or not _is_real(bias):
        return False
    return bias == -inf or -_MAX <= bias <= _MAX


@dataclass(slots=True)
class Timings:
    """Host clock readings of one request."""

    submitted_ns: int = field(default_factory=time.perf_counter_ns)
    started_ns: int = 0  # first chunk staged
    first_token_ns: int = 0
    finished_ns: int = 0

    @property
    def prompt_ms(self) -> float:
        """From the first chunk staged to the first token on the host."""
        return (self.first_token_ns - self.started_ns) / 1e6

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return (self.finished_ns - self.first_token_ns) / 1e6


@dataclass(slots=True)
class Observations:
    """How the prompt steps of one request were answered; packed ones count for each request."""

    num_steps: int = 0
    num_seeded: int = 0  # whose graph was instantiated at that step
    num_replayed: int = 0


@dataclass(slots=True)
class Request:
    """One prompt and its answer. Owned by the engine; readers see it through the stream."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None  # what the answer must follow; the engine's thread moves it
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    text: str = ""  # of the answer so far, as far as it is certain
    finish_reason: FinishReason | None = None
    stopping_word: str | None = None
    timings: Timings = field(default_factory=Timings)
    deadline_ns: int | None = None  # of time.perf_counter_ns; the request ends with an error then
    num_cached: int = 0  # prompt tokens whose K/V was reused, at the first admission
    reuses_prefix: bool = True  # where the engine does
    reports_progress: bool = False  # deltas without a token tell how far the prompt is
    wanted_slot: int | None = None  # it waits for this one; None: takes any
    slot: int | None = None  # that it was given first
    observations: Observations = field(default_factory=Observations)
    pooling: Pooling | None = None  # asked for an embedding or a score, and for no token
    embedding: tuple[tuple[float, ...], ...] | None = None  # one row, or one for each token (NONE)
    is_scored: bool = False  # the pooled row goes through the model's head in place of being told
    score: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def set_deadline(self, seconds: float) -> None:
        """End with DeadlineExceeded when it is not finished so long after it was made."""
        if not 0 < seconds < inf:
            raise BadParameter("seconds", seconds, "a time above 0")
        self.deadline_ns = self.timings.submitted_ns + int(seconds * 1e9)

    def move(self, to: Status) -> None:
        """The only way a status changes. Raises IllegalMove off the table."""
        if to not in EDGES[self.status]:
            raise IllegalMove(f"a request cannot go from {self.status.value} to {to.value}")
        self.status = to


class TokenIds(tuple[int, ...]):
    """Ids that are plain whole numbers, be it that `whole_numbers` looked at each of them."""

    below: int | None = None  # that each is known to be under, and none is negative then

    @classmethod
    def known(cls, token_ids: Iterable[int], below: int) -> Self:
        """Ids of which the caller knows that they are plain whole numbers from 0, under a bound."""
        ids = cls(token_ids)
        ids.below = below
        return ids


def checked_prompt(prompt_ids: Iterable[int], context_len: int, vocab_size: int) -> TokenIds:
    """Token ids of a prompt that can run. Raises EmptyPrompt, PromptTooLong, BadToken."""
    ids = whole_numbers(prompt_ids)
    if not ids:
        raise EmptyPrompt
    if len(ids) >= context_len:
        raise PromptTooLong(len(ids), context_len)
    if not _all_within(ids, vocab_size):
        position = next(at for at, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise BadToken(position, ids[position], vocab_size)
    return ids


def whole_numbers(prompt_ids: Iterable[int]) -> TokenIds:
    """Token ids as plain ints, from a list, an array or a tensor. Raises BadToken for others."""
    if isinstance(prompt_ids, TokenIds):
        return prompt_ids
    ids = TokenIds(prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    checked = []
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise BadToken(position, token)
        try:
            checked.append(operator.index(token))
        except TypeError:  # a tensor of another kind has the method too
            raise BadToken(position, token) from None
    return TokenIds(checked)


def _all_within(ids: TokenIds, vocab_size: int) -> bool:
    """Whether every id is one of the model's."""
    if ids.below is not None and ids.below <= vocab_size:
        return True
    if len(ids) < _MANY_IDS:
        return min(ids) >= 0 and max(ids) < vocab_size
    try:
        numbers = np.fromiter(ids, np.int64, len(ids))
    except OverflowError:
        return False
    return bool(numbers.min() >= 0 and numbers.max() < vocab_size)
