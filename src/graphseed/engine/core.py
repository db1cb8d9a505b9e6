"""The engine without its thread: memory, cache and steps of one model on one device.

Owns the KV memory, the block pool, the scheduler, the graph cache and the step runner. Sees the
Driver protocol and no driver. Every call belongs to one thread: EngineThread's, or the caller's
where a program needs no thread (measurements, tests).
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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
from graphseed.engine.answer import Answer, Cancelled, DeadlineExceeded, Delta
from graphseed.engine.blocks import BlockPool, BlockTable
from graphseed.engine.config import EngineConfig, resolve
from graphseed.engine.errors import EngineBusy, PromptTooLong
from graphseed.engine.guard import DeviceGuard
from graphseed.engine.kv import KvMemory, bytes_per_token
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.engine.request import Request, SamplingParams, Status, checked_prompt
from graphseed.engine.sampler import Sampled, Sampler, SampleRow
from graphseed.engine.scheduler import Batch, Scheduler, Sequence
from graphseed.engine.settling import Settler
from graphseed.engine.step import StepObserver, StepRunner
from graphseed.models.model import Model


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
        self._answers: dict[int, Answer] = {}  # by id of the request
        self._pending: list[Delta] = []  # of requests that ended outside a step
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
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return self.scheduler.is_idle and not self._pending

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
        try:
            for namespace, capacity in (
                (Namespace.PROMPT, self.config.num_ubatch), (Namespace.DECODE, 1),
            ):  # fmt: skip
                plan = StepPlan(namespace, capacity, (part,))
                self._guard.run("the warm-up", partial(self.runner.run_direct, plan))
        finally:
            table.close()
        self._guard.run("the warm-up", self.driver.synchronize)

    def request(self, prompt_ids: Iterable[int], params: SamplingParams | None = None) -> Request:
        """Check a prompt and make it a request. May be called on any thread.

        `prompt_ids` is any iterable of whole numbers. Raises RequestError when it cannot run here.
        """
        ids = checked_prompt(prompt_ids, self.config.context_len, self.model.vocab_size)
        return Request(ids, params or SamplingParams())

    def submit(self, request: Request, kv_digest: bool = False) -> None:
        """Let a request wait for its turn. Raises QueueFull, and BadParameter for a bias."""
        self._check_open()
        self._sampler.check(request.params)
        if len(request.prompt_ids) >= self.config.context_len:  # it was resized since the check
            raise PromptTooLong(len(request.prompt_ids), self.config.context_len)
        self.scheduler.add(request)
        self._answers[id(request)] = Answer(
            request, self.config.context_len, self.model.eos_ids, self.model.decode, kv_digest
        )

    def cancel(self, request: Request) -> None:
        """Give a request up: its slot and blocks are free at once. Does nothing when it ended."""
        self._end(request, Cancelled("the request was cancelled"))

    def step(self) -> list[Delta]:
        """Run one step and return what it brought; nothing when there is nothing to do.

        An error of a step ends the requests in it and no other. Raises DeviceLost, after which
        nothing can run; every open request has then ended with that error (see `fail_all`).
        """
        self._check_open()
        self._end_overdue()
        batch = self.scheduler.next()
        self.cache.num_unfinished_prompts = self.scheduler.num_unfinished_prompts
        if batch is None:
            return self._taken_pending()
        for part in batch.parts:
            self._start(part.sequence)
        try:
            logits = self._run(batch)
            self.scheduler.submitted(batch)
        except DeviceLost:
            raise
        except Exception as error:
            self._fail(batch, error)
            return self._taken_pending()
        self.cache.num_unfinished_prompts = self.scheduler.num_unfinished_prompts
        is_streaming = any(s.request.status is Status.DECODE for s in self.scheduler.sequences)
        self._guard.run("a capture", partial(self._settler.after_step, batch, is_streaming))
        try:
            self._sample(batch, logits)
        except DeviceLost:
            raise
        except Exception as error:
            self._fail(batch, error)
        return self._taken_pending()

    def settle(self, max_captures: int | None = None) -> int:
        """Capture what waits for it (policy resident); returns how many captures were tried."""
        self._check_open()
        return self._guard.run("a capture", partial(self.cache.settle, max_captures))

    def fail_all(self, error: Exception) -> list[Delta]:
        """End every open request with one error."""
        for answer in list(self._answers.values()):
            self._end(answer.request, error)
        return self._taken_pending()

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
                self._pending += [delta for delta in deltas if delta.request is not request]
                for delta in deltas:
                    if delta.request is request:
                        if delta.error is not None:
                            raise delta.error
                        yield delta
                        if delta.is_last:
                            return
        finally:
            if not self._is_closed:
                self._end(request, Cancelled("the stream was closed"))
                self._pending = [d for d in self._pending if d.request is not request]
                if not self._guard.is_lost and self.scheduler.is_idle:
                    self.settle()  # idle: it delays nobody

    def _run(self, batch: Batch) -> torch.Tensor:
        parts = tuple(
            SequencePart(
                np.asarray(p.sequence.tokens[p.start : p.start + p.num_tokens], dtype=np.int32),
                p.start, p.sequence.table,
            )
            for p in batch.parts
        )  # fmt: skip
        plan = StepPlan(batch.namespace, batch.capacity, parts, batch.seq_capacity)
        what = f"a {batch.namespace.value} step"
        return self._guard.run(what, partial(self.runner.run, plan, self.observer))

    def _sample(self, batch: Batch, logits: torch.Tensor) -> None:
        if not any(part.is_last for part in batch.parts):
            return
        # Every row is sampled, in one go; what is not a prompt's last row is not looked at.
        rows = [
            SampleRow(p.sequence.request.params, p.start + p.num_tokens - 1, p.sequence.tokens)
            for p in batch.parts
        ]
        sampled = self._guard.run("sampling", partial(self._sampler.sample, logits, rows))
        for part, result in zip(batch.parts, sampled, strict=True):
            if not part.is_last:
                continue
            # One request's error is its own: what the others got is kept.
            try:
                self._take(part.sequence, result)
            except DeviceLost:
                raise
            except Exception as error:
                self._end(part.sequence.request, error)

    def _take(self, sequence: Sequence, sampled: Sampled) -> None:
        request = sequence.request
        if sampled.error is not None:
            raise sampled.error
        answer = self._answers[id(request)]
        delta = answer.take(sampled)
        if not delta.is_last:
            self.scheduler.appended(sequence, sampled.token)
            self._pending.append(delta)
            return
        if answer.is_digesting:
            # The last token was sampled, not run: its K/V does not exist.
            indices = torch.from_numpy(sequence.table.kv_indices(0, request.num_tokens - 1))
            read = partial(self.runner.kv.digest, indices)
            delta = replace(delta, kv_digest=self._guard.run("reading KV memory", read))
        answer.finish()
        self.scheduler.finish(request)
        del self._answers[id(request)]
        self._pending.append(delta)

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.status is Status.WAITING:
            request.timings.started_ns = time.perf_counter_ns()
            request.num_cached = sequence.num_cached
            request.move(Status.PREFILL)

    def _fail(self, batch: Batch, error: Exception) -> None:
        for part in batch.parts:
            self._end(part.sequence.request, error)

    def _end(self, request: Request, error: Exception) -> None:
        """End one request with an error; nothing happens when it has ended."""
        answer = self._answers.pop(id(request), None)
        if answer is not None:
            self.scheduler.finish(request)
            self._pending.append(answer.fail(error))

    def _end_overdue(self) -> None:
        now = time.perf_counter_ns()
        for answer in list(self._answers.values()):
            request = answer.request
            if request.deadline_ns is not None and now >= request.deadline_ns:
                seconds = (request.deadline_ns - request.timings.submitted_ns) / 1e9
                self._end(request, DeadlineExceeded(seconds, len(request.output_ids)))

    def _taken_pending(self) -> list[Delta]:
        taken, self._pending = self._pending, []
        return taken

    def _resolve(self, config: EngineConfig) -> EngineConfig:
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
        self._sampler = Sampler(self.model.vocab_size, self.model.device)
        self.pool = BlockPool(config.num_blocks, config.block_len, config.reuses_prefixes)
        self.scheduler = Scheduler(config, self.pool, config.max_waiting)
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
