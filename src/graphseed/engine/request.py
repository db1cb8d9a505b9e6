"""One request: what was asked, where it stands, what came out.

Owns SamplingParams, Request and its status machine. Does not know the device or how steps run.
"""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from graphseed.capture.errors import IllegalMove
from graphseed.engine.errors import BadParameter


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # admitted, no chunk submitted
    PREFILL = "prefill"  # some chunks submitted
    DECODE = "decode"  # producing tokens
    FINISHED = "finished"
    FAILED = "failed"  # ended by an error or given up by its reader


EDGES: Final[dict[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.FAILED}),
    Status.PREFILL: frozenset({Status.DECODE, Status.FAILED}),
    Status.DECODE: frozenset({Status.FINISHED, Status.FAILED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
}


class FinishReason(Enum):
    """Why an answer ended."""

    END_OF_SEQUENCE = "eos"
    STOP_STRING = "word"
    MAX_TOKENS = "limit"
    CONTEXT_FULL = "context"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises BadParameter for a value out of range."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # with the position, decides every draw
    max_tokens: int = 128  # new tokens; -1: until the context is full
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise BadParameter("temperature (--temp)", self.temperature, "0 or more")
        if self.top_k < 0:
            raise BadParameter("top_k (--top-k)", self.top_k, "0 (all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise BadParameter("top_p (--top-p)", self.top_p, "above 0, at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise BadParameter("min_p (--min-p)", self.min_p, "0 to 1")
        if self.max_tokens < -1 or self.max_tokens == 0:
            raise BadParameter("max_tokens (-n)", self.max_tokens, "-1 (no limit) or at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise BadParameter("seed (-s)", self.seed, "0 to 2**64 - 1")
        if any(not stop for stop in self.stop):
            raise BadParameter("stop", self.stop, "non-empty strings")


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
class Request:
    """One prompt and its answer. Owned by the engine; readers see it through the stream."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopping_word: str | None = None
    timings: Timings = field(default_factory=Timings)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def move(self, to: Status) -> None:
        """The only way a status changes. Raises IllegalMove off the table."""
        if to not in EDGES[self.status]:
            raise IllegalMove(f"a request cannot go from {self.status.value} to {to.value}")
        self.status = to
