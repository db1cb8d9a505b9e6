"""One request on its way: prefill, then token by token.

Owns Answer: the order of the steps of one request, its block table and its text. Does not own the
device's memory or the cache; those are the engine's.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from graphseed.capture.cache import GraphCache
from graphseed.capture.identity import Namespace
from graphseed.engine.blocks import BlockTable
from graphseed.engine.chunks import plan_chunks
from graphseed.engine.config import EngineConfig
from graphseed.engine.guard import DeviceGuard
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.engine.request import FinishReason, Request, Status
from graphseed.engine.sampler import sample
from graphseed.engine.step import StepObserver, StepRunner
from graphseed.engine.text import AnswerText
from graphseed.models.model import Model


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of an answer: the token, and the text that became certain with it."""

    token_id: int
    text: str
    request: Request
    kv_digest: str | None = None  # on the last, when asked for


@dataclass(slots=True)
class Answer:
    """Runs one request. Made by the engine for one stream; engine thread only."""

    model: Model
    config: EngineConfig
    cache: GraphCache
    runner: StepRunner
    guard: DeviceGuard
    table: BlockTable
    request: Request
    observer: StepObserver | None
    is_digesting: bool

    def run(self) -> Iterator[Delta]:
        """Prefill, then one Delta for each new token."""
        request = self.request
        text = AnswerText(self.model.decode, request.params.stop)
        logits = self._prefill()
        while True:
            token = self._choose(logits)
            is_eos = token in self.model.eos_ids and not request.params.ignore_eos
            shown = "" if is_eos else text.push(token)
            reason = self._finish_reason(text.stopping_word, is_eos)
            if reason is not None:
                request.timings.finished_ns = time.perf_counter_ns()
                request.finish_reason, request.stopping_word = reason, text.stopping_word
                request.move(Status.FINISHED)
                digest = self._digest() if self.is_digesting else None
                yield Delta(token, shown + text.flush(), request, digest)
                return
            yield Delta(token, shown, request)
            logits = self._decode()

    def _prefill(self) -> torch.Tensor:
        request = self.request
        request.timings.started_ns = time.perf_counter_ns()
        request.move(Status.PREFILL)
        self.cache.prompt_admitted()
        try:
            num_tokens = len(request.prompt_ids)
            self.table.grow(num_tokens)
            for chunk in plan_chunks(num_tokens, self.config.num_ubatch):
                part = part_of(request.prompt_ids[chunk.start : chunk.end], chunk.start, self.table)
                logits = self._step(
                    "a prompt step", StepPlan(Namespace.PROMPT, chunk.capacity, (part,))
                )
                # The next work is submitted: what earlier chunks observed can be captured beside
                # it (policy resident), and the chunks that follow replay.
                if chunk.end < num_tokens:
                    self.guard.run("a capture", partial(self.cache.settle, 1))
            return logits
        finally:
            self.cache.prompt_finished()

    def _decode(self) -> torch.Tensor:
        request = self.request
        self.table.grow(request.num_tokens)
        part = part_of((request.output_ids[-1],), request.num_tokens - 1, self.table)
        return self._step("a decode step", StepPlan(Namespace.DECODE, 1, (part,)))

    def _step(self, what: str, plan: StepPlan) -> torch.Tensor:
        return self.guard.run(what, partial(self.runner.run, plan, self.observer))

    def _choose(self, logits: torch.Tensor) -> int:
        request = self.request
        choose = partial(sample, logits[0], request.params, request.num_tokens - 1)
        token = self.guard.run("sampling", choose)
        if not request.output_ids:
            request.timings.first_token_ns = time.perf_counter_ns()
            request.move(Status.DECODE)
        request.output_ids.append(token)
        return token

    def _finish_reason(self, stopping_word: str | None, is_eos: bool) -> FinishReason | None:
        request = self.request
        if is_eos:
            return FinishReason.END_OF_SEQUENCE
        if stopping_word is not None:
            return FinishReason.STOP_STRING
        if len(request.output_ids) == request.params.max_tokens:
            return FinishReason.MAX_TOKENS
        if request.num_tokens >= self.config.context_len:
            return FinishReason.CONTEXT_FULL
        return None

    def _digest(self) -> str:
        # The last token was sampled, not run: its K/V does not exist.
        indices = torch.from_numpy(self.table.kv_indices(0, self.request.num_tokens - 1))
        return self.guard.run("reading KV memory", partial(self.runner.kv.digest, indices))


def part_of(token_ids: Sequence[int], start: int, table: BlockTable) -> SequencePart:
    """A sequence's tokens of one step, from `start` on."""
    return SequencePart(np.asarray(token_ids, dtype=np.int32), start, table)
