"""When there is a model: loading, sleeping, waking, and the end.

Owns Lifecycle, which alone changes `served`, `is_sleeping`, `is_closing` and `refusal` of a state,
and the facts about the model that are told while it sleeps. How a model is loaded is the command
line's.

An engine that ends by itself (a lost device, a fault of ours) is the end of the server: what is
open ends with an error, what comes is answered 503, also /health, and the process exits with 1, as
llama-server aborts: only a new process can use the device again, and what supervises this one sees
that one is needed. An error of one step ends the requests in it, and nothing else.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from graphseed.server.errors import Failed, Unavailable, of_exception
from graphseed.server.facts import ModelFacts
from graphseed.server.ledger import CURRENT, Ledger
from graphseed.server.state import Served, ServerState
from graphseed.server.watch.graph_watch import GraphWatch

R = TypeVar("R")

POLL_SECONDS: Final = 0.05
WATCH_SECONDS: Final = 0.25  # between two looks at whether the engine still runs

logger = logging.getLogger("graphseed.server")


class Lifecycle:
    """One server's model, from loading to the end. Used on the event loop's thread.

    `load` makes the model ready and returns it; without it the state's model is what there is.
    `close` ends an engine, and `release` gives back what is left once nobody refers to it. All run
    on threads of their own.
    """

    def __init__(
        self,
        state: ServerState,
        load: Callable[[], Served] | None = None,
        *,
        close: Callable[[Served], None] | None = None,
        release: Callable[[], None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.state = state
        self.ledger = ledger or Ledger()
        self.graphs = GraphWatch()  # what prompt graphs did, in every engine so far
        self.is_loading = False
        self._load = load
        self._close = close or _close_engine
        self._release = release or _nothing
        self._facts: ModelFacts | None = None
        self._facts_of: Served | None = None
        self._lock = asyncio.Lock()  # one change at a time
        self._num_needing = 0  # HTTP requests that need the model
        self._last_needed = time.monotonic()
        self._on_loaded: list[Callable[[Served], None]] = []

    @property
    def facts(self) -> ModelFacts | None:
        """What is known of the model, asleep or not; None while it is loaded the first time."""
        served = self.state.served
        if served is not None and served is not self._facts_of and not self.state.is_closing:
            self._facts = ModelFacts.of(self.state)
            self._facts_of = served
        return self._facts

    def on_loaded(self, call: Callable[[Served], None]) -> None:
        """Call for the model that is there, and for each that is loaded, before it is asked."""
        self._on_loaded.append(call)
        if self.state.served is not None:
            call(self.state.served)

    async def load(self) -> None:
        """Load the model. Raises what prevented it."""
        if self._load is None:
            raise RuntimeError("this server was made with its model and loads none")
        self.is_loading = True
        try:
            served = await _in_thread(self._load)
        finally:
            self.is_loading = False
        if self.state.is_closing:  # meanwhile
            await _in_thread(partial(self._close, served))
            return
        for call in self._on_loaded:
            call(served)
        self.state.served = served
        self.state.is_sleeping = False
        self._last_needed = time.monotonic()
        _ = self.facts  # before it can fall asleep

    async def need(self) -> None:
        """Say that the present HTTP request needs the model; wakes it. Raises ApiError.

        The gate calls `no_longer` when the request has ended.
        """
        record = CURRENT.get()
        if record is not None and not record.needs_model:
            record.needs_model = True
            self._num_needing += 1
        if not self.state.is_sleeping or self.state.is_closing:
            return
        async with self._lock:
            if self.state.is_sleeping:
                logger.info("waking up: loading the model")
                try:
                    await self.load()
                except Exception as error:
                    logger.exception("the model could not be loaded again")
                    raise Failed("the model could not be loaded again") from error
        if self.state.is_closing:
            raise Unavailable(self.state.refusal)

    def no_longer(self) -> None:
        """Say that a request that needed the model has ended."""
        self._num_needing -= 1
        self._last_needed = time.monotonic()

    async def sleep_when_idle(self) -> None:
        """Unload the model whenever nothing needed it for `sleep_idle_seconds`. Never returns."""
        seconds = self.state.settings.sleep_idle_seconds
        while True:
            idle = time.monotonic() - self._last_needed
            is_busy = self._num_needing or self.ledger.num_open or self.state.served is None
            if not is_busy and idle >= seconds:
                await self._sleep()
            await asyncio.sleep(min(POLL_SECONDS, seconds))

    async def until_failed(self) -> Exception:
        """Wait until an engine has ended by itself, and say why. It is never another's turn."""
        while True:
            served = self.state.served
            if served is not None and served.engine.ended is not None:
                self.state.refusal = of_exception(served.engine.ended).message
                return served.engine.ended
            await asyncio.sleep(WATCH_SECONDS)

    async def drain(self, seconds: float) -> bool:
        """Take nothing new and let running answers end; whether all did in `seconds`."""
        self.state.is_closing = True
        until = time.monotonic() + seconds
        while self.ledger.num_open:
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def close(self) -> None:
        """End what is open and release the device. May be called twice."""
        self.state.is_closing = True
        async with self._lock:
            await self._drop()

    async def _sleep(self) -> None:
        async with self._lock:
            if self._num_needing or self.state.is_closing:
                return
            logger.info("going to sleep: the model is unloaded until a request needs it")
            self.state.is_sleeping = True
            await self._drop()

    async def _drop(self) -> None:
        served = self.state.served
        if served is None:
            return
        _ = self.facts  # told while it sleeps
        self.state.served = self._facts_of = None
        await _in_thread(partial(self._close, served))
        self.ledger.clear()
        del served
        await _in_thread(self._release)


async def _in_thread(function: Callable[[], R]) -> R:
    """Run on a thread of its own, which does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def tell(result: R | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: R | None = None
        failed: BaseException | None = None
        try:
            result = function()
        except BaseException as error:
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, failed)

    threading.Thread(target=run, name="graphseed-lifecycle", daemon=True).start()
    return await done


def _close_engine(served: Served) -> None:
    served.engine.close()


def _nothing() -> None:
    """Give back nothing: the device keeps what it has."""
