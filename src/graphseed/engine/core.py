"""The engine without its thread: memory, cache and steps of one model on one device.

Owns the KV memory, the block pool, the scheduler, the graph cache and the step runner. Sees the
Driver protocol and no driver. Every call belongs to one thread: EngineThread's, or the caller's
where a program needs no thread (measurements, tests).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

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
from graphseed.engine.answer import Cancelled, Delta
from graphseed.engine.answers import Answers
from graphseed.engine.blocks import BlockPool, BlockTable
from graphseed.engine.config import EngineConfig, resolve
from graphseed.engine.errors import BadParameter, EngineBusy, ModelCannot, PromptTooLong
from graphseed.engine.grammar import Grammar
from graphseed.engine.guard import DeviceGuard
from graphseed.engine.kv import KvMemory, bytes_per_token
from graphseed.engine.penalties import check_biases
from graphseed.engine.plan import Reads, SequencePart, StepPlan
from graphseed.engine.request import Pooling, Request, SamplingParams, Status, checked_prompt
from graphseed.engine.scheduler import Batch, Scheduler, Sequence
from graphseed.engine.settling import Settler
from graphseed.engine.step import StepObserver, StepRunner
from graphseed.models.model import Model

R = TypeVar("R")


class EngineCore:
    """Runs requests on one model and device, a step at a time. One thread; closed by its owner.

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
        self.observer: StepObserver | None = None  # sees every step
        self._guard = DeviceGuard(driver, self.cache)
        self._answers = Answers(model, self._guard)
        self._is_closed = False
        self.config = self._resolve(config or EngineConfig())
        self._settler = Settler(self.cache, self.config.settle_budget_ms)
        self.runner: StepRunner
        self.pool: BlockPool
        self.scheduler: Scheduler
        self._allocate()

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return self.pool.num_free

    @property
    def longest_capture_beside_stream_ms(self) -> float:
        """The longest time that a capture held up a running stream (policy resident)."""
        return self._settler.longest_streaming_ms

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return self.scheduler.is_idle and not self._answers.has_pending

    def warm_up(self) -> None:
        """Initialise libraries and compile kernels by direct runs that are no observations.

        Capture cannot initialise libraries (I2 would then break for the first real prompt). Call it
        on the thread that will run the requests.
        """
        self._check_open()
        dtype = str(self.model.dtype).removeprefix("torch.")
        self._guard.run("the warm-up", partial(self.driver.prime, dtype))
        table = BlockTable(self.pool, self.config.max_blocks)
        table.grow(1)
        part = SequencePart(np.zeros(1, dtype=np.int32), 0, table)
        reads = Reads.LOGITS if self.model.can_generate else Reads.HIDDEN
        try:
            for namespace, capacity in (
                (Namespace.PROMPT, self.config.num_ubatch), (Namespace.DECODE, 1),
            ):  # fmt: skip
                plan = StepPlan(namespace, capacity, (part,), reads=reads)
                self._guard.run("the warm-up", partial(self.runner.run_direct, plan))
        finally:
            table.close()
        self._guard.run("the warm-up", self.driver.synchronize)

    def request(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Check a prompt and make it a request. May be called on any thread.

        `prompt_ids` is any iterable of whole numbers. Raises RequestError when it cannot run here.
        """
        if not self.model.can_generate:
            raise ModelCannot(self.model.name, self.model.kind)
        ids = checked_prompt(prompt_ids, self.config.context_len, self.model.vocab_size)
        params = params or SamplingParams()
        check_biases(params, self.model.vocab_size)
        return Request(ids, params, grammar)

    def embedding_request(self, prompt_ids: Iterable[int], pooling: Pooling) -> Request:
        """Check a prompt whose embedding is asked for. May be called on any thread.

        Raises RequestError when it cannot run here, for one when the config has no `embeds`.
        """
        if not self.config.embeds:
            raise BadParameter("embeds", False, "an engine that was made with it (--embeddings)")
        ids = checked_prompt(prompt_ids, self.config.context_len, self.model.vocab_size)
        return Request(ids, SamplingParams(), pooling=pooling)

    def score_request(self, prompt_ids: Iterable[int]) -> Request:
        """Check a prompt whose score is asked for: a reranker's, of its last token (`model.pair`).

        May be called on any thread. Raises RequestError when it cannot run here.
        """
        if self.model.can_generate:
            raise ModelCannot(self.model.name, self.model.kind)
        request = self.embedding_request(prompt_ids, Pooling.LAST)
        request.is_scored = True
        return request

    def submit(self, request: Request, kv_digest: bool = False) -> None:
        """Let a request wait for its turn. Raises RequestError: QueueFull, or what it asks for."""
        self._check_open()
        if request.status is not Status.WAITING:
            raise BadParameter("request", request.status.value, "one that was not handed in")
        wanted, num_slots = request.wanted_slot, self.config.num_parallel
        if wanted is not None and not 0 <= wanted < num_slots:
            raise BadParameter("wanted_slot", wanted, f"a slot from 0 to {num_slots - 1}")
        if len(request.prompt_ids) >= self.config.context_len:  # it was resized since the check
            raise PromptTooLong(len(request.prompt_ids), self.config.context_len)
        self._answers.open(request, self.config.context_len, kv_digest)

    def cancel(self, request: Request) -> None:
        """Give a request up: its slot and blocks are free at once. Does nothing when it ended."""
        self._answers.end(request, Cancelled("the request was cancelled"))

    def step(self) -> list[Delta]:
        """Run one step and return what it brought; nothing when there is nothing to do.

        An error of a step ends the requests in it and no other. Raises DeviceLost, after which
        nothing can run; every open request has then ended with that error (see `fail_all`).
        """
        self._check_open()
        self._answers.end_overdue()
        batch = self.scheduler.next()
        self.cache.num_unfinished_prompts = self.scheduler.num_unfinished_prompts
        if batch is None:
            return self._answers.taken()
        for part in batch.parts:
            self._start(part.sequence)
        try:
            output = self._run(batch)
            self.scheduler.submitted(batch)
            for part in batch.parts:
                self._report(part.sequence.request, part.start + part.num_tokens)
        except DeviceLost:
            raise
        except Exception as error:
            self._answers.fail(batch, error)
            return self._answers.taken()
        self.cache.num_unfinished_prompts = self.scheduler.num_unfinished_prompts
        is_streaming = any(s.request.status is Status.DECODE for s in self.scheduler.sequences)
        self._guard.run("a capture", partial(self._settler.after_step, batch, is_streaming))
        try:
            self._answers.read(batch, output)
        except DeviceLost:
            raise
        except Exception as error:
            self._answers.fail(batch, error)
        return self._answers.taken()

    def settle(self, max_captures: int | None = None) -> int:
        """Capture what waits for it (policy resident); returns how many captures were tried."""
        self._check_open()
        return self._guard.run("a capture", partial(self.cache.settle, max_captures))

    def fail_all(self, error: Exception) -> list[Delta]:
        """End every open request with one error."""
        self._answers.fail_all(error)
        return self._answers.taken()

    def stream(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        observer: StepObserver | None = None,
        kv_digest: bool = False,
    ) -> Iterator[Delta]:
        """Answer one prompt by stepping on the calling thread.

        Raises RequestError before anything runs when the prompt cannot, and the error that ends
        the request; an iterator that is closed early gives everything back. Not for a core that a
        thread of its own steps.
        """
        self._check_open()
        return self._stream(self.request(prompt_ids, params), observer, kv_digest)

    def generate(
        self, prompt_ids: Iterable[int], params: SamplingParams | None = None
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

        Raises EngineBusy while requests are open, and DeviceMemoryError, after which the engine has
        its old size.
        """
        self._check_open()
        if self._answers:
            raise EngineBusy(
                f"{len(self._answers)} answers are being streamed; end or close them before the "
                "context is resized"
            )
        old = self.config
        self.config = self._resolve(replace(old, context_len=context_len))
        self.cache.rebind(Bindings())  # nothing may be launched while memory moves
        try:
            del self.runner
            self._allocate()
        except BaseException:
            self.config = old
            self._allocate()
            raise

    def weights_changed(self) -> tuple[str, ...]:
        """Say that parameters of the model were replaced; recordings over the old are stale (I7).

        Returns the names that moved. Parameters are taken as frozen otherwise: this is the only
        way in which the engine learns of it. Cached prompt prefixes are dropped too.
        """
        self._check_open()
        self.pool.forget()
        return self.cache.rebind(self._bindings())

    def on_device(self, what: str, work: Callable[[], R]) -> R:
        """Run device work that is no step, between two steps. Raises DeviceMemoryError, DeviceLost.

        The engine ends with the first step after a device was lost.
        """
        self._check_open()
        return self._guard.run(what, work)

    def finish(self) -> tuple[list[str], str | None]:
        """Raise the alarms of the end.

        Returns the summary, a line for each namespace, and why a selector had no effect, if so.
        """
        self._watch.finish()
        lines = [self.tally.line(namespace) for namespace in Namespace]
        return lines, self.tally.no_effect(self.cache.selection)

    def close(self) -> None:
        """Release graphs and KV memory; streams that are open end. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.fail_all(Closed("the engine is closed"))
        try:
            if not self._guard.is_lost:
                self.cache.close()
        finally:
            del self.runner

    def _stream(
        self, request: Request, observer: StepObserver | None, kv_digest: bool
    ) -> Iterator[Delta]:
        self.submit(request, kv_digest)
        try:
            while True:
                outer, self.observer = self.observer, observer or self.observer
                try:
                    deltas = self.step()
                finally:
                    self.observer = outer
                # Other streams of this thread find theirs waiting.
                self._answers.keep([delta for delta in deltas if delta.request is not request])
                for delta in deltas:
                    if delta.request is request:
                        if delta.error is not None:
                            raise delta.error
                        yield delta
                        if delta.is_last:
                            return
        finally:
            if not self._is_closed:
                self._answers.end(request, Cancelled("the stream was closed"))
                self._answers.drop(request)
                if not self._guard.is_lost and self.scheduler.is_idle:
                    self.settle()  # idle: it delays nobody

    def _run(self, batch: Batch) -> torch.Tensor:
        what = f"a {batch.namespace.value} step"
        before = self._prompt_counts()
        output = self._guard.run(what, partial(self.runner.run, batch.plan(), self.observer))
        if batch.namespace is Namespace.PROMPT:
            num_seeded, num_replayed = (
                after - was for after, was in zip(self._prompt_counts(), before, strict=True)
            )
            for part in batch.parts:
                seen = part.sequence.request.observations
                seen.num_steps += 1
                seen.num_seeded += num_seeded
                seen.num_replayed += num_replayed
        return output

    def _prompt_counts(self) -> tuple[int, int]:
        counts = self.tally.counts[Namespace.PROMPT]
        return counts.seeded, counts.replayed

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.status is Status.WAITING:
            request.timings.started_ns = time.perf_counter_ns()
            request.num_cached, request.slot = sequence.num_cached, sequence.slot
            request.move(Status.PREFILL)
            self._report(request, sequence.num_cached)

    def _report(self, request: Request, num_done: int) -> None:
        if request.reports_progress and request.status is Status.PREFILL:
            self._answers.keep([Delta(request, num_prompt_done=num_done)])

    def _resolve(self, config: EngineConfig) -> EngineConfig:
        if not self.model.can_generate:  # hidden states are all that its steps have
            config = replace(config, embeds=True)
        return resolve(
            config,
            model_context_len=self.model.context_len,
            kv_bytes_per_token=bytes_per_token(self.model.layers, self.model.dtype),
            free_bytes=self.driver.free_bytes(),
        )

    def _allocate(self) -> None:
        config = self.config
        # Plain tensors, whatever mode the caller is in: they are written in every later mode.
        with torch.inference_mode(False):
            kv = KvMemory(
                self.model.layers, config.num_blocks, config.block_len, self.model.dtype,
                self.model.device, self.driver.free_bytes(),
            )  # fmt: skip
            make = partial(StepRunner, self.model, self.driver, self.cache, config, kv)
            self.runner = self._guard.run("static buffers", make)
        self.pool = BlockPool(config.num_blocks, config.block_len, config.reuses_prefixes)
        self.scheduler = Scheduler(config, self.pool, config.max_waiting)
        self._answers.bind(self.scheduler, kv)
        self.cache.rebind(self._bindings())

    def _bindings(self) -> Bindings:
        module = self.model.module
        weights = [*module.named_parameters(), *module.named_buffers()]
        return Bindings(
            (*((name, tensor.data_ptr()) for name, tensor in weights), *self.runner.addresses)
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the engine is closed")
        if self._guard.is_lost:
            raise DeviceLost("the device was lost by an earlier error; start a new process")
