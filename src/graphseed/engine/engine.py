"""The engine: requests in, tokens out, one sequence at a time.

Owns the KV memory, the block pool, the graph cache and the step runner of one model on one device.
Sees the Driver protocol and no driver. Does not know the command line or HTTP.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from graphseed.capture.alarm import SeedWatch
from graphseed.capture.budget import Budget
from graphseed.capture.cache import GraphCache
from graphseed.capture.driver import Driver
from graphseed.capture.errors import Closed, DeviceLost
from graphseed.capture.events import EventLog
from graphseed.capture.identity import Bindings, Namespace
from graphseed.capture.selector import Selection
from graphseed.capture.tally import Tally
from graphseed.engine.blocks import BlockPool, BlockTable
from graphseed.engine.chunks import plan_chunks
from graphseed.engine.config import EngineConfig, resolve
from graphseed.engine.errors import (
    DeviceMemoryError,
    EmptyPrompt,
    PromptTooLong,
    TokenOutOfRange,
)
from graphseed.engine.guard import DeviceGuard
from graphseed.engine.kv import KvMemory, bytes_per_token
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.engine.request import FinishReason, Request, SamplingParams, Status
from graphseed.engine.sampler import sample
from graphseed.engine.step import StepObserver, StepRunner
from graphseed.engine.text import AnswerText
from graphseed.models.model import Model


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of an answer: the token, and the text that became certain with it."""

    token_id: int | None  # None when only held text is shown
    text: str
    request: Request
    kv_digest: str | None = None  # on the last, when asked for


class Engine:
    """Runs prompts on one model and device. Owned by its caller, who closes it; one thread.

    Raises DeviceMemoryError when the KV memory does not fit.
    """

    def __init__(
        self,
        model: Model,
        driver: Driver,
        config: EngineConfig | None = None,
        selection: Selection | None = None,
        *,
        log: EventLog | None = None,
        budgets: Mapping[Namespace, Budget] | None = None,
    ) -> None:
        self.model = model
        self.driver = driver
        self.log = log or EventLog()
        self.tally = Tally(driver.device)
        self.log.subscribe(self.tally)
        self._watch = SeedWatch(self.log, driver.device)
        self.cache = GraphCache(driver, selection, budgets=budgets, log=self.log)
        self.config = self._resolve(config or EngineConfig())
        self._guard = DeviceGuard(driver, self.cache)
        self._is_closed = False
        self._allocate()

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return self.pool.num_free

    def warm_up(self) -> None:
        """Initialise libraries and compile kernels by direct runs that are no observations.

        Capture cannot initialise libraries (I2 would then break for the first real prompt).
        """
        self.driver.prime(str(self.model.dtype).removeprefix("torch."))
        table = self._new_table()
        table.grow(1)
        try:
            for namespace, capacity in (
                (Namespace.PROMPT, self.config.num_ubatch), (Namespace.DECODE, 1),
            ):  # fmt: skip
                plan = StepPlan(namespace, capacity, (_part((0,), 0, table),))
                self._guard.run("the warm-up", partial(self.runner.run_direct, plan))
        finally:
            table.close()
        self.driver.synchronize()

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        observer: StepObserver | None = None,
        kv_digest: bool = False,
    ) -> Iterator[Delta]:
        """Answer one prompt, token by token.

        Raises RequestError before anything runs when the prompt cannot; an iterator that is closed
        early gives everything back.
        """
        self._check_open()
        params = params or SamplingParams()
        self._validate(prompt_ids)
        return self._answer(Request(tuple(prompt_ids), params), observer, kv_digest)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None
    ) -> tuple[str, Request]:
        """Answer one prompt and return its whole text and the finished request."""
        text, request = "", None
        for delta in self.stream(prompt_ids, params):
            text, request = text + delta.text, delta.request
        if request is None:
            raise RuntimeError("the stream ended without a token")
        return text, request

    def resize(self, context_len: int) -> None:
        """Allocate KV memory anew for another context length; every recording becomes stale (I7).

        Raises DeviceMemoryError, and the engine then keeps its old size.
        """
        self._check_open()
        old = self.config
        self.config = self._resolve(replace(old, context_len=context_len))
        self.cache.rebind(Bindings())  # nothing may be launched while memory moves
        del self.runner, self.kv
        try:
            self._allocate()
        except DeviceMemoryError:
            self.config = old
            self._allocate()
            raise

    def finish(self) -> tuple[list[str], str | None]:
        """Raise the alarms of the end.

        Returns the summary, a line for each namespace, and why a selector had no effect, if so.
        """
        self._watch.finish()
        lines = [self.tally.line(namespace) for namespace in Namespace]
        return lines, self.tally.no_effect(self.cache.selection)

    def close(self) -> None:
        """Release graphs and KV memory. May be called twice."""
        if self._is_closed:
            return
        if not self._guard.is_lost:
            self.cache.close()
        self._is_closed = True
        del self.runner, self.kv

    def _answer(
        self, request: Request, observer: StepObserver | None, kv_digest: bool
    ) -> Iterator[Delta]:
        table = self._new_table()
        self.runner.observer = observer
        try:
            yield from self._run(request, table, kv_digest)
        finally:
            if request.status not in (Status.FINISHED, Status.FAILED):
                request.move(Status.FAILED)
            self.runner.observer = None
            table.close()
            if not self._guard.is_lost and request.status is Status.FINISHED:
                self.cache.settle()  # idle: captures delay nobody

    def _run(self, request: Request, table: BlockTable, kv_digest: bool) -> Iterator[Delta]:
        params = request.params
        text = AnswerText(self.model.decode, params.stop)
        logits = self._prefill(request, table)
        while True:
            choose = partial(sample, logits[0], params, request.num_tokens - 1)
            token = self._guard.run("sampling", choose)
            if not request.output_ids:
                request.timings.first_token_ns = time.perf_counter_ns()
                request.move(Status.DECODE)
            request.output_ids.append(token)
            is_eos = token in self.model.eos_ids and not params.ignore_eos
            shown = "" if is_eos else text.push(token)
            reason = self._finish_reason(request, text.stopping_word, is_eos)
            if reason is not None:
                request.timings.finished_ns = time.perf_counter_ns()
                request.finish_reason, request.stopping_word = reason, text.stopping_word
                request.move(Status.FINISHED)
                digest = self._digest(table, request) if kv_digest else None
                yield Delta(token, shown + text.flush(), request, digest)
                return
            yield Delta(token, shown, request)
            logits = self._decode(request, table)

    def _prefill(self, request: Request, table: BlockTable) -> torch.Tensor:
        self.cache.prompt_admitted()
        try:
            request.timings.started_ns = time.perf_counter_ns()
            request.move(Status.PREFILL)
            num_tokens = len(request.prompt_ids)
            table.grow(num_tokens)
            for chunk in plan_chunks(num_tokens, self.config.num_ubatch):
                part = _part(request.prompt_ids[chunk.start : chunk.end], chunk.start, table)
                plan = StepPlan(Namespace.PROMPT, chunk.capacity, (part,))
                logits = self._guard.run("a prompt step", partial(self.runner.run, plan))
            return logits
        finally:
            self.cache.prompt_finished()

    def _decode(self, request: Request, table: BlockTable) -> torch.Tensor:
        position = request.num_tokens - 1
        table.grow(request.num_tokens)
        part = _part((request.output_ids[-1],), position, table)
        plan = StepPlan(Namespace.DECODE, 1, (part,))
        return self._guard.run("a decode step", partial(self.runner.run, plan))

    def _finish_reason(
        self, request: Request, stopping_word: str | None, is_eos: bool
    ) -> FinishReason | None:
        if is_eos:
            return FinishReason.END_OF_SEQUENCE
        if stopping_word is not None:
            return FinishReason.STOP_STRING
        if len(request.output_ids) == request.params.max_tokens:
            return FinishReason.MAX_TOKENS
        if request.num_tokens >= self.config.context_len:
            return FinishReason.CONTEXT_FULL
        return None

    def _digest(self, table: BlockTable, request: Request) -> str:
        # The last token was sampled, not run: its K/V does not exist.
        indices = table.kv_indices(0, request.num_tokens - 1)
        return self.kv.digest(torch.from_numpy(indices))

    def _new_table(self) -> BlockTable:
        return BlockTable(self.pool, self.config.max_blocks)

    def _resolve(self, config: EngineConfig) -> EngineConfig:
        return resolve(
            config,
            model_context_len=self.model.context_len,
            kv_bytes_per_token=bytes_per_token(self.model.layers, self.model.dtype),
            free_bytes=self.driver.free_bytes(),
        )

    def _allocate(self) -> None:
        self.kv = KvMemory(
            self.model.layers, self.config.num_blocks, self.config.block_len, self.model.dtype,
            self.model.device, self.driver.free_bytes(),
        )  # fmt: skip
        self.pool = BlockPool(self.config.num_blocks, self.config.block_len)
        self.runner = StepRunner(self.model, self.driver, self.cache, self.config, self.kv)
        self.cache.rebind(
            Bindings((*_weight_addresses(self.model), *self.kv.addresses, *self.runner.addresses))
        )

    def _validate(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise EmptyPrompt
        if len(prompt_ids) >= self.config.context_len:
            raise PromptTooLong(len(prompt_ids), self.config.context_len)
        for position, token in enumerate(prompt_ids):
            if not 0 <= token < self.model.vocab_size:
                raise TokenOutOfRange(position, token, self.model.vocab_size)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the engine is closed")
        if self._guard.is_lost:
            raise DeviceLost("the device was lost by an earlier error; start a new process")


def _part(token_ids: Sequence[int], start: int, table: BlockTable) -> SequencePart:
    return SequencePart(np.asarray(token_ids, dtype=np.int32), start, table)


def _weight_addresses(model: Model) -> tuple[tuple[str, int], ...]:
    named = [*model.module.named_parameters(), *model.module.named_buffers()]
    return tuple((name, tensor.data_ptr()) for name, tensor in named)
