"""Handles: one submitted request as its reader sees it, on a thread or in an event loop.

Owns how tokens get from the engine's thread to their reader, and that a reader who goes gives its
request up. Does not know how a request is submitted or run.
"""

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Protocol

from graphseed.capture.errors import GraphseedError
from graphseed.engine.answer import Delta
from graphseed.engine.request import Request

Sink = Callable[[Delta], None]


class Cancels(Protocol):
    """What can give a request up, from any thread; nothing happens to one that has ended."""

    def cancel(self, request: Request) -> None:
        """Give a request up."""


class _Reading:
    """What handles share: whether their request was read to its end."""

    _has_ended = True  # as long as there is no request: `__del__` is called in any case

    def __init__(self, engine: Cancels, request: Request) -> None:
        self.request: Final = request
        self._engine = engine
        self._has_ended = False

    def cancel(self) -> None:
        """Give the request up; its slot and blocks are free at the next step."""
        self._engine.cancel(self.request)

    def close(self) -> None:
        """Stop reading: the request is cancelled unless it has ended."""
        if not self._has_ended:
            self._has_ended = True
            self.cancel()

    def disown(self) -> None:
        """Let the request be: it was not handed in by this handle."""
        self._has_ended = True

    def __del__(self) -> None:
        self.close()  # nobody reads any more

    def _passed(self, delta: Delta) -> Delta:
        if delta.is_last:
            self._has_ended = True
        if delta.error is not None:
            raise delta.error
        return delta


class Handle(_Reading):
    """One submitted request as its reader sees it. Safe to use from any thread."""

    def __init__(self, engine: Cancels, request: Request) -> None:
        super().__init__(engine, request)
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self.sink: Sink = self._deltas.put  # keeps the queue alive, not the handle

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """Wait for the next token. Raises what ended the request, if that was an error."""
        if self._has_ended:
            raise StopIteration
        return self._passed(self._deltas.get())


class AsyncHandle(_Reading):
    """One submitted request as its reader in an event loop sees it. Made and used in that loop."""

    _on_closed: Callable[[], None] | None = None

    def __init__(self, engine: Cancels, request: Request) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(engine, request)
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        has_news: asyncio.Future[None] = loop.create_future()

        def arrive(delta: Delta) -> None:
            deltas.put_nowait(delta)
            if not has_news.done():
                has_news.set_result(None)

        def sink(delta: Delta) -> None:
            loop.call_soon_threadsafe(arrive, delta)

        self._loop = loop
        self._deltas = deltas
        self.has_news = has_news  # done once the first delta has come
        self.sink: Sink = sink  # keeps the queue alive, not the handle

    def on_closed(self, call: Callable[[], None]) -> None:
        """Call, in the loop and once, when the reader has gone: at the end, early, or unseen."""
        self._on_closed = call

    def __aiter__(self) -> "AsyncHandle":
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next token. Raises what ended the request, if that was an error."""
        if self._has_ended:
            self.close()
            raise StopAsyncIteration
        try:
            return self._passed(await self._deltas.get())
        except GraphseedError:  # what ended it
            self.close()
            raise

    def close(self) -> None:
        super().close()
        tell, self._on_closed = self._on_closed, None
        if tell is not None:
            tell()

    async def aclose(self) -> None:
        """Stop reading, as `close`: what contextlib.aclosing calls."""
        self.close()

    def __del__(self) -> None:
        super().close()
        if self._on_closed is not None:  # whose thread this is, nobody knows
            with suppress(RuntimeError):  # the loop has ended, and all that counted with it
                self._loop.call_soon_threadsafe(self._on_closed)
