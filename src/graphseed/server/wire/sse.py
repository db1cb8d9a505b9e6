"""Answers that take time: server-sent events, pings, and what happens when the client goes away.

Owns the event stream of every endpoint and `unless_gone`, its counterpart for answers that are not
streamed. Does not know any endpoint's events.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from graphseed.server.errors import ApiError, Failed, of_exception
from graphseed.server.settings import ServerSettings
from graphseed.server.wire.jobs import Begun

logger = logging.getLogger(__name__)

T = TypeVar("T")
Event = dict[str, Any] | str  # the data of an event, or whole frames as they go out (`named`)
Events = AsyncGenerator[Event, None]

PING: bytes = b":\n\n"
DONE: str = "data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ClientGone(ApiError):
    """The client went away before its answer was there. Nobody reads this."""

    status: ClassVar[int] = 499
    kind: ClassVar[str] = "client_closed_request"

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


def named(name: str, data: dict[str, Any]) -> str:
    """An event with a name, as the Responses API and Anthropic's have them."""
    return f"event: {name}\ndata: {_json(data)}\n\n"


async def event_stream(
    request: Request,
    events: Events,
    settings: ServerSettings,
    *,
    ends_with_done: bool,
    begun: Begun | None = None,
    ping_seconds: float | None = None,
    error_event: Callable[[ApiError], Event] = lambda error: error.body,
) -> StreamingResponse:
    """Answer with events, as they come.

    `events` is an async generator of dicts (each is one `data:` event) and strings (whole frames:
    `named` makes them). `begun` is what it reads, if that was handed in already.

    The response's head goes out with the first event, or with a ping before it, or at once where
    all that was begun runs: it is in nobody's way then, and would be once there is a token. What
    `events` raises before the head has gone out is raised here, so that the client gets a plain
    HTTP error; what it raises later goes out as `error_event` and ends the stream. While nothing
    comes, a ping goes out every `ping_seconds` (None: the server's; -1: none).

    A client that disconnects ends it at any time: `finally` in the generator runs, where it had
    started, and what was begun is given up. The request's body must have been read. Raises
    ClientGone.
    """
    interval = settings.sse_ping_seconds if ping_seconds is None else ping_seconds
    stream = _EventStream(request, events, begun, interval, ends_with_done, error_event)
    try:
        await stream.begun()
    except BaseException as error:
        await stream.end()
        if not isinstance(error, ClientGone) or not stream.has_begun:
            raise
    return stream


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client disconnects. Raises ClientGone then.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _ended(task, gone)


class _EventStream(StreamingResponse):
    """Sends events while it listens for the client to disconnect, and pings when it is quiet.

    It sends as soon as there is an event, from its own task, and not only once the framework calls
    it: each task between the first token and its client would keep the client waiting. Being called
    is to wait for the end.
    """

    def __init__(
        self,
        request: Request,
        events: Events,
        begun: Begun | None,
        ping_seconds: float,
        ends_with_done: bool,
        error_event: Callable[[ApiError], Event],
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        # What is sent is `_send_all`'s.
        super().__init__((), media_type="text/event-stream", headers=headers)
        loop = asyncio.get_running_loop()
        self._events = events
        self._work = begun
        self._ping_seconds = ping_seconds
        self._ends_with_done = ends_with_done
        self._error_event = error_event
        self._loop = loop
        self._sent_at = loop.time()
        self._send = request._send  # what the framework will call this response with
        self._has_begun: asyncio.Future[None] = loop.create_future()
        self._lock = asyncio.Lock()  # events and pings are sent one after the other
        self._timer: asyncio.TimerHandle | None = None  # of the next look at whether it is quiet
        self._ping: asyncio.Future[None] | None = None  # the last one; the next follows it
        self._may_ping = ping_seconds > 0
        self._receive = request.receive
        self._gone: asyncio.Task[None] | None = None
        self._sending = asyncio.create_task(self._send_all())

    async def begun(self) -> None:
        """Wait until something was sent. Raises what prevented it, or ClientGone."""
        self._gone = asyncio.create_task(_disconnected(self._receive))
        first = {self._has_begun, self._sending, self._gone}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self.has_begun:
            return
        if self._sending.done():
            self._sending.result()
        raise ClientGone

    @property
    def has_begun(self) -> bool:
        """Whether something was sent."""
        return self._has_begun.done()

    async def end(self) -> None:
        """Send nothing more, and let the generator end."""
        self._stop_pings()
        running = (self._gone, self._sending, self._ping)
        try:
            await _ended(*(task for task in running if task is not None))
        finally:
            await self._events.aclose()
            if self._work is not None:  # a generator that had not started has not closed it
                self._work.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = {task for task in (self._sending, self._gone) if task is not None}
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self.end()
        if not self._sending.cancelled():
            self._sending.result()  # raises what sending raised
        if self.background is not None:
            await self.background()

    async def _send_all(self) -> None:
        if self._may_ping:
            self._ping_after(self._ping_seconds)
        try:
            await self._send_events()
        finally:
            self._stop_pings()
        if self._ping is not None:
            await asyncio.wait({self._ping})  # one that has begun to be sent
        await self._put(b"", is_last=True)

    async def _send_events(self) -> None:
        try:
            if self._work is not None and self._work.are_running:
                async with self._lock:
                    await self._start()
            async for event in self._events:
                await self._put(_frame(event))
            if self._ends_with_done:
                await self._put(DONE.encode())
        except ClientDisconnect:  # nobody reads
            raise
        except Exception as error:
            if not self.has_begun:
                if self._ping is not None:
                    self._ping.cancel()  # it would start the response
                raise
            told = of_exception(error)
            if isinstance(told, Failed):
                logger.exception("a stream ended with an error")
            await self._put(_frame(self._error_event(told)))

    def _ping_after(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._ping_when_quiet)

    def _ping_when_quiet(self) -> None:
        left = self._sent_at + self._ping_seconds - self._loop.time()
        if left > 0:
            self._ping_after(left)
            return
        self._ping = asyncio.ensure_future(self._put(PING))
        self._ping.add_done_callback(self._pinged)

    def _pinged(self, ping: asyncio.Future[None]) -> None:
        # What a ping raised is not looked at: a client that is gone ends its stream in other ways.
        if not ping.cancelled() and ping.exception() is None and self._may_ping:
            self._ping_after(self._ping_seconds)

    def _stop_pings(self) -> None:
        """Begin no other ping; one that is being sent goes on."""
        self._may_ping = False
        if self._timer is not None:
            self._timer.cancel()

    async def _put(self, body: bytes, *, is_last: bool = False) -> None:
        self._sent_at = self._loop.time()
        async with self._lock:
            if not self.has_begun:
                await self._start()
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _start(self) -> None:
        self._has_begun.set_result(None)
        start = {"type": "http.response.start", "status": self.status_code}
        await self._send({**start, "headers": self.raw_headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is not looked at."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _frame(event: Event) -> bytes:
    text = event if isinstance(event, str) else f"data: {_json(event)}\n\n"
    return text.encode()


def _json(data: dict[str, Any]) -> str:
    return _ENCODER.encode(data)
