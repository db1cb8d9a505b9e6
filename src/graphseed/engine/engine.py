"""The engine with its thread: submit from any thread or event loop, read tokens as they come.

Owns the one thread that captures, launches and destroys graphs, and who reads which request.
What a step does is the core's; this file only carries requests in and deltas out.
"""

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

from graphseed.capture.errors import Closed, GraphseedError
from graphseed.engine.answer import Cancelled, Delta
from graphseed.engine.core import EngineCore
from graphseed.engine.errors import BadParameter, QueueFull
from graphseed.engine.grammar import Grammar
from graphseed.engine.handles import AsyncHandle, Handle, Sink
from graphseed.engine.request import Request, SamplingParams, Status

logger = logging.getLogger(__name__)

R = TypeVar("R")

RETRY_SECONDS: Final = 0.005
JOIN_SECONDS: Final = 60.0  # a step ends long before; a device that hangs must not hang close()
WAKING_SECONDS: Final = 1e-4  # a reader that slept for long needs 60 us to come to itself


class Engine:
    """Runs an EngineCore on a thread of its own. Every method may be called from any thread.

    Owns the core and closes it. Made with a core that no other thread has stepped.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Who reads what, by id of the request; engine thread only.
        self._readers: dict[int, tuple[Request, Sink]] = {}
        self._lock = threading.RLock()  # a handle may be collected while this thread holds it
        self._open: set[int] = set()  # ids of requests submitted and not ended; under the lock
        self._is_closing = False
        self._is_done = False  # the thread takes nothing more from the inbox; under the lock
        self._ended: Exception | None = None  # what ended the engine, if not close()
        self._thread = threading.Thread(target=self._loop, name="graphseed-engine", daemon=True)
        self._thread.start()
        # A thread that still holds graphs when the interpreter ends would end the process badly.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)
        try:
            self.call(core.warm_up)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ended(self) -> Exception | None:
        """What ended the engine, if not `close`: a lost device, or a fault of ours."""
        return self._ended

    @property
    def num_open(self) -> int:
        """Requests that were handed in and have not ended."""
        return len(self._open)

    def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        seconds: float | None = None,
        grammar: Grammar | None = None,
        kv_digest: bool = False,
    ) -> Handle:
        """Hand in one prompt and return at once; iterate over the handle for its tokens.

        `seconds` is the time after which the request ends with DeadlineExceeded; a `grammar` is
        the request's own. Raises RequestError where the prompt cannot run, QueueFull, Closed.
        """
        return self.start(self._request(prompt_ids, params, seconds, grammar), kv_digest=kv_digest)

    def start(self, request: Request, *, kv_digest: bool = False) -> Handle:
        """Hand in a request that the core made (`core.request`, `embedding_request`, ...).

        Raises BadParameter for one that was handed in before, QueueFull, Closed.
        """
        handle = Handle(self, request)
        self._hand_in(handle, kv_digest)
        return handle

    def stream(self, prompt_ids: Iterable[int], params: SamplingParams | None = None) -> Handle:
        """Answer one prompt token by token; a handle that is closed or dropped early cancels it."""
        return self.submit(prompt_ids, params)

    async def astream(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        seconds: float | None = None,
        grammar: Grammar | None = None,
    ) -> AsyncIterator[Delta]:
        """Answer one prompt token by token, in an event loop; leaving early cancels it."""
        request = self._request(prompt_ids, params, seconds, grammar)
        async with aclosing(self.aread(request)) as deltas:
            async for delta in deltas:
                yield delta

    def aread(self, request: Request) -> AsyncHandle:
        """Hand in a request that the core made, and read it in the event loop of this thread.

        Raises as `start`, and RuntimeError where no loop runs.
        """
        handle = AsyncHandle(self, request)
        self._hand_in(handle, kv_digest=False)
        return handle

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[Request]:
        """Answer a list of prompts together and return the finished requests in their order.

        The first error of a request is raised, once the others were cancelled.
        """
        makers = [partial(self._request, prompt, params, None, None) for prompt in prompts]
        return self.run(makers, progress=progress)

    def run(
        self, makers: Sequence[Callable[[], Request]], *, progress: bool = False
    ) -> list[Request]:
        """Run a request of each maker together and return them, finished, in their order.

        A maker is called when its request is handed in, again where the queue was full. The first
        error of a request is raised, once the others were cancelled.
        """
        handles: list[Handle] = []
        try:
            for number in _shown(range(len(makers)), progress):
                # As many as may wait are handed in ahead of the one that is read.
                while len(handles) < len(makers):
                    try:
                        handles.append(self.start(makers[len(handles)]()))
                    except QueueFull:
                        if number < len(handles):
                            break
                        time.sleep(RETRY_SECONDS)  # other clients fill the queue
                for _ in handles[number]:
                    pass
        finally:
            for handle in handles:
                handle.close()
        return [handle.request for handle in handles]

    def cancel(self, request: Request) -> None:
        """Give a request up; nothing happens when it has ended."""
        with self._lock:
            if not self._is_done:
                self._inbox.put(lambda: self.core.cancel(request))

    def call(self, function: Callable[[], R]) -> R:
        """Run a function on the engine's thread, between two steps, and return its result."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[R] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._check_open()
            self._inbox.put(run)
        return future.result()

    def close(self) -> None:
        """End every open request, release the device, stop the thread. May be called twice."""
        with self._lock:
            self._is_closing = True
            self._inbox.put(lambda: None)  # wakes a thread that waits for work
        atexit.unregister(self._at_exit)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                logger.error("the engine's thread did not end within %g s", JOIN_SECONDS)

    def _request(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None,
        seconds: float | None,
        grammar: Grammar | None,
    ) -> Request:
        self._check_open()
        request = self.core.request(prompt_ids, params, grammar)
        if seconds is not None:
            request.set_deadline(seconds)
        return request

    def _hand_in(self, handle: Handle | AsyncHandle, kv_digest: bool) -> None:
        try:
            self._enter(handle.request, handle.sink, kv_digest)
        except BaseException:
            handle.disown()
            raise

    def _enter(self, request: Request, sink: Sink, kv_digest: bool) -> None:
        config = self.core.config
        with self._lock:
            self._check_open()
            if id(request) in self._open or request.status is not Status.WAITING:
                raise BadParameter("request", request.status.value, "one that was not handed in")
            if len(self._open) >= config.num_parallel + config.max_waiting:
                raise QueueFull(len(self._open) - config.num_parallel, config.max_waiting)
            self._open.add(id(request))
            self._inbox.put(partial(self._take_in, request, sink, kv_digest))

    def _take_in(self, request: Request, sink: Sink, kv_digest: bool) -> None:
        self._readers[id(request)] = (request, sink)
        try:
            self.core.submit(request, kv_digest)
        except GraphseedError as error:  # the engine has ended meanwhile
            request.move(Status.FAILED)
            self._hand_out([Delta(request, is_last=True, error=error)])

    def _loop(self) -> None:
        try:
            while not self._is_closing:
                self._take_inbox()
                if not self.core.is_idle:
                    self._hand_out(self.core.step())
        except Exception as error:  # a lost device, or a fault of ours: nothing more can run
            self._ended = error
        finally:
            self._is_closing = True
            why = self._ended or Cancelled("the engine was closed")
            try:
                self._hand_out(self.core.fail_all(why))
                self.core.close()
            except Exception:
                logger.exception("the engine could not release everything")
            finally:
                self._drain()
                self._abandon(why)

    def _take_inbox(self) -> None:
        while self.core.is_idle and self._inbox.empty():
            # Nothing to run: what waits to be captured is captured now, one by one, so that a
            # request that comes in waits for one capture at most.
            if not self.core.settle(1):
                self._inbox.get()()
                break
        while not self._inbox.empty():
            self._inbox.get()()

    def _drain(self) -> None:
        """Answer what came in after the end: each call gets its error, each request too."""
        while True:
            with self._lock:
                if self._inbox.empty():
                    self._is_done = True
                    return
            self._inbox.get()()

    def _hand_out(self, deltas: Iterable[Delta]) -> None:
        is_awaited = False  # a reader waits for its answer to begin, and this is a part of that
        has_begun = False  # it is the first token
        for delta in deltas:
            key, request = id(delta.request), delta.request
            if len(request.output_ids) < 2:
                is_awaited = True
                has_begun |= delta.token_id is not None
            _, sink = self._readers[key]
            if delta.is_last:
                del self._readers[key]
                with self._lock:
                    self._open.discard(key)
            try:
                sink(delta)
            except Exception:  # its reader is gone, and must not take others with it
                logger.debug("a reader of an answer failed", exc_info=True)
                if not delta.is_last:
                    self._readers[key] = (request, _nobody)
                    self.core.cancel(request)
        if is_awaited:
            # Let go of the interpreter: preparing the next step would keep it from the reader for
            # a good part of a millisecond. Where others run too, their next tokens come first.
            time.sleep(WAKING_SECONDS if has_begun and len(self._readers) < 2 else 0)

    def _abandon(self, why: Exception) -> None:
        """Tell every reader that is still waiting, whatever went wrong before."""
        for request, sink in self._readers.values():
            try:
                sink(Delta(request, is_last=True, error=why))
            except Exception:
                logger.debug("a reader of an answer failed", exc_info=True)
        self._readers.clear()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # one object, raised to every caller
        if self._is_closing:
            raise Closed("the engine is closed")


def _nobody(delta: Delta) -> None:
    """The sink of a request whose reader is gone."""


def _close_if_alive(engine: "weakref.ref[Engine]") -> None:
    alive = engine()
    if alive is not None:
        alive.close()


def _shown(numbers: range, progress: bool) -> Iterable[int]:
    if not progress:
        return numbers
    from rich.progress import track

    return track(numbers, description="prompts")
