"""The engine: requests in, tokens out, one sequence at a time.

Owns the KV memory, the block pool, the graph cache and the step runner of one model on one device.
Sees the Driver protocol and no driver. Does not know the command line or HTTP.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

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
from graphseed.engine.answer import Answer, Delta, part_of
from graphseed.engine.blocks import BlockPool, BlockTable
from graphseed.engine.config import EngineConfig, resolve
from graphseed.engine.errors import BadToken, EmptyPrompt, EngineBusy, PromptTooLong
from graphseed.engine.guard import DeviceGuard
from graphseed.engine.kv import KvMemory, bytes_per_token
from graphseed.engine.plan import StepPlan
from graphseed.engine.request import Request, SamplingParams, Status
from graphseed.engine.step import StepObserver, StepRunner
from graphseed.models.model import Model


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
        self._guard = DeviceGuard(driver, self.cache)
        self._num_streams = 0
        self._is_closed = False
        self.config = self._resolve(config or EngineConfig())
        self.runner: StepRunner
        self.pool: BlockPool
        self._allocate()

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return self.pool.num_free

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
        try:
            for namespace, capacity in (
                (Namespace.PROMPT, self.config.num_ubatch), (Namespace.DECODE, 1),
            ):  # fmt: skip
                plan = StepPlan(namespace, capacity, (part_of((0,), 0, table),))
                self._guard.run("the warm-up", partial(self.runner.run_direct, plan))
        finally:
            table.close()
        self._guard.run("the warm-up", self.driver.synchronize)

    def stream(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        observer: StepObserver | None = None,
        kv_digest: bool = False,
    ) -> Iterator[Delta]:
        """Answer one prompt, token by token.

        `prompt_ids` is any iterable of whole numbers. Raises RequestError before anything runs when
        the prompt cannot; an iterator that is closed early gives everything back.
        """
        self._check_open()
        request = Request(self._checked(prompt_ids), params or SamplingParams())
        return self._answer(request, observer, kv_digest)

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

        Raises EngineBusy while an answer is being streamed, and DeviceMemoryError, after which the
        engine has its old size.
        """
        self._check_open()
        if self._num_streams:
            raise EngineBusy(
                f"{self._num_streams} answers are being streamed; end or close them before the "
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
        way in which the engine learns of it.
        """
        self._check_open()
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
        try:
            if not self._guard.is_lost:
                self.cache.close()
        finally:
            del self.runner

    def _answer(
        self, request: Request, observer: StepObserver | None, is_digesting: bool
    ) -> Iterator[Delta]:
        self._check_open()
        table = BlockTable(self.pool, self.config.max_blocks)
        answer = Answer(
            self.model, self.config, self.cache, self.runner, self._guard, table, request,
            observer, is_digesting,
        )  # fmt: skip
        self._num_streams += 1
        try:
            for delta in answer.run():
                yield delta
                if request.status is Status.DECODE:
                    self._check_open()  # it may have been closed while the reader was away
        finally:
            self._num_streams -= 1
            if request.status not in (Status.FINISHED, Status.FAILED):
                request.move(Status.FAILED)
            table.close()
            if not self._guard.is_lost and not self._is_closed:
                self._guard.run("a capture", self.cache.settle)  # idle: it delays nobody

    def _checked(self, prompt_ids: Iterable[int]) -> tuple[int, ...]:
        checked = []
        for position, token in enumerate(prompt_ids):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise BadToken(position, token)
            try:
                checked.append(operator.index(token))
            except TypeError:  # a tensor of another kind has the method too
                raise BadToken(position, token) from None
        if not checked:
            raise EmptyPrompt
        if len(checked) >= self.config.context_len:
            raise PromptTooLong(len(checked), self.config.context_len)
        for position, number in enumerate(checked):
            if not 0 <= number < self.model.vocab_size:
                raise BadToken(position, number, self.model.vocab_size)
        return tuple(checked)

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
        self.pool = BlockPool(config.num_blocks, config.block_len)
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
