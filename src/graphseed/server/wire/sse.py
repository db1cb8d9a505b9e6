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

logger = logging.getLogger(__name__)

T = TypeVar("T")
Event = dict[str, Any] | str  # the data of an event, or whole frames as they go out (`named`)
Events = AsyncGenerator[Event, None]

PING: bytes = b":\n\n"
DONE: str = "data: [DONE]\n\n"


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
    ping_seconds: float | None = None,
    error_event: Callable[[ApiError], Event] = lambda error: error.body,
) -> StreamingResponse:
    """Answer with events, as they come; the response starts with the first of them.

    `events` is an async generator of dicts (each is one `data:` event) and strings (whole frames:
    `named` makes them). What it raises before its first event is raised here, so that the client
    gets a plain HTTP error; what it raises later goes out as `error_event` and ends the stream.
    While nothing comes, a ping goes out every `ping_seconds` (None: the server's; -1: none); the
    first of them starts the response. A client that disconnects closes the generator, at any time:
    `finally` in it runs, and a Generation that it reads is cancelled. The request's body must have
    been read. Raises ClientGone.
    """
    interval = settings.sse_ping_seconds if ping_seconds is None else ping_seconds
    first = asyncio.create_task(_next(events))
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait(
            {first, gone},
            timeout=interval if interval > 0 else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if first.done():
            first.result()  # raises what ended it
        elif gone.done():
            raise ClientGone
    except BaseException:
        await _ended(first, gone)
        await events.aclose()
        raise
    return _EventStream(first, gone, events, interval, ends_with_done, error_event)


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
    """Sends events while it listens for the client to disconnect, and pings when it is quiet."""

    def __init__(
        self,
        first: asyncio.Task[Event | None],
        gone: asyncio.Task[None],
        events: Events,
        ping_seconds: float,
        ends_with_done: bool,
        error_event: Callable[[ApiError], Event],
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        # What is sent is `_send_all`'s.
        super().__init__((), media_type="text/event-stream", headers=headers)
        self._first = first
        self._gone = gone
        self._events = events
        self._ping_seconds = ping_seconds
        self._ends_with_done = ends_with_done
        self._error_event = error_event
        self._sent_at = 0.0  # of the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        try:
            await asyncio.wait({sending, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(self._gone)
            await _ended(sending)
            await _ended(self._first)
            await self._events.aclose()
        if not sending.cancelled():
            sending.result()  # raises what sending raised
        if self.background is not None:
            await self.background()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        if not self._first.done():
            await self._send(send, PING)
        pings = asyncio.create_task(self._send_pings(send))
        try:
            await self._send_events(send)
        finally:
            await _ended(pings)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        try:
            event = await self._first
            while event is not None:
                await self._send(send, _frame(event))
                event = await _next(self._events)
            if self._ends_with_done:
                await self._send(send, DONE.encode())
        except ClientDisconnect:  # nobody reads
            raise
        except Exception as error:
            told = of_exception(error)
            if isinstance(told, Failed):
                logger.exception("a stream ended with an error")
            await self._send(send, _frame(self._error_event(told)))

    async def _send_pings(self, send: Send) -> None:
        if self._ping_seconds <= 0:
            return
        clock = asyncio.get_running_loop().time
        while True:
            quiet = clock() - self._sent_at
            if quiet >= self._ping_seconds:
                await self._send(send, PING)
                quiet = 0.0
            await asyncio.sleep(self._ping_seconds - quiet)

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _next(events: Events) -> Event | None:
    return await anext(events, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is not looked at."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _frame(event: Event) -> bytes:
    text = event if isinstance(event, str) else f"data: {_json(event)}\n\n"
    return text.encode()


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
