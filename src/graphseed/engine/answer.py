"""One request's answer: which tokens end it, and what of its text may be shown.

Owns Answer and Delta. Does not run steps and holds no device memory.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from graphseed.capture.errors import GraphseedError
from graphseed.engine.request import FinishReason, Request, Status
from graphseed.engine.sampler import Sampled
from graphseed.engine.text import AnswerText


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of an answer: the token, and the text that became certain with it."""

    request: Request
    token_id: int | None = None  # None where the request ended without one
    text: str = ""
    sampled: Sampled | None = None  # with the log-probabilities that were asked for
    is_last: bool = False  # whether the request ended with it
    error: Exception | None = None  # what ended the request, if that was an error
    kv_digest: str | None = None  # on the last, when asked for
    num_prompt_done: int | None = None  # prompt tokens cached or submitted; only where asked for


@dataclass(slots=True)
class Answer:
    """Takes the tokens of one request. Owned by the engine; its thread only."""

    request: Request
    context_len: int
    eos_ids: Collection[int]
    decode: Callable[[list[int]], str]
    is_digesting: bool = False
    text: AnswerText = field(init=False)

    def __post_init__(self) -> None:
        self.text = AnswerText(self.decode, self.request.params.stop)

    def take(self, sampled: Sampled) -> Delta:
        """Take one token and say what may be shown; after a last one, `finish` follows."""
        request, token = self.request, sampled.token
        if not request.output_ids:
            request.timings.first_token_ns = time.perf_counter_ns()
        if request.status is Status.PREFILL:
            request.move(Status.DECODE)
        request.output_ids.append(token)
        is_eos = token in self.eos_ids and not request.params.ignore_eos
        shown = "" if is_eos else self.text.push(token)
        reason = self._finish_reason(is_eos)
        if reason is not None:
            shown += self.text.flush()
            request.finish_reason, request.stopping_word = reason, self.text.stopping_word
        request.text += shown
        return Delta(request, token, shown, sampled, is_last=reason is not None)

    def _finish_reason(self, is_eos: bool) -> FinishReason | None:
        request = self.request
        if is_eos:
            return FinishReason.END_OF_SEQUENCE
        if self.text.stopping_word is not None:
            return FinishReason.STOP_STRING
        if len(request.output_ids) == request.params.max_tokens:
            return FinishReason.MAX_TOKENS
        if request.num_tokens >= self.context_len:
            return FinishReason.CONTEXT_FULL
        return None


def finish(request: Request) -> None:
    """End a request well."""
    request.timings.finished_ns = time.perf_counter_ns()
    request.move(Status.FINISHED)


def fail(request: Request, error: Exception) -> Delta:
    """End a request with an error."""
    request.timings.finished_ns = time.perf_counter_ns()
    request.finish_reason = None
    request.move(Status.FAILED)
    return Delta(request, is_last=True, error=error)


class Cancelled(GraphseedError):
    """The request's reader gave it up."""


class DeadlineExceeded(GraphseedError, TimeoutError):
    """The request did not finish in the time it was given."""

    def __init__(self, seconds: float, num_tokens: int) -> None:
        super().__init__(
            f"the request did not finish within {seconds:g} s; it has {num_tokens} new tokens"
        )
