"""Event streams: frames, pings, errors before and after the first event, clients that leave."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from graphseed.engine import QueueFull
from graphseed.server.errors import ApiError, InvalidRequest, of_exception
from graphseed.server.settings import ServerSettings
from graphseed.server.wire.sse import ClientGone, Event, event_stream, named, unless_gone
from tests.server.small import leave_when, listening

Events = Callable[[], AsyncGenerator[Event, None]]
QUIET = ServerSettings(sse_ping_seconds=0.2)


class Seen:
    """What the server's side saw, told to the test's thread."""

    def __init__(self) -> None:
        self.has_begun, self.has_ended = threading.Event(), threading.Event()
        self.error: BaseException | None = None


@contextlib.contextmanager
def served(events: Events, **more: Any) -> Iterator[str]:
    """An application with one stream at its root."""

    async def root(request: Request) -> Response:
        await request.body()
        try:
            return await event_stream(request, events(), QUIET, **{"ends_with_done": False, **more})
        except Exception as error:
            told = of_exception(error)
            return JSONResponse(told.body, told.status, headers=told.headers)

    with listening(Starlette(routes=[Route("/", root, methods=["POST"])])) as address:
        yield address


def answer(events: Events, **more: Any) -> httpx.Response:
    with served(events, **more) as address:
        return httpx.post(address, json={}, timeout=10)


async def two() -> AsyncGenerator[Event, None]:
    yield {"a": "é"}
    yield named("named", {"b": [1]})


def test_events_go_out_as_they_are_written() -> None:
    reply = answer(two)
    assert reply.text == 'data: {"a":"é"}\n\nevent: named\ndata: {"b":[1]}\n\n'
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] == "no-cache"


def test_done_comes_last_where_it_is_wanted() -> None:
    assert answer(two, ends_with_done=True).text.endswith("}\n\ndata: [DONE]\n\n")


def test_a_stream_of_nothing_is_one() -> None:
    async def none() -> AsyncGenerator[Event, None]:
        return
        yield {}

    reply = answer(none, ends_with_done=True)
    assert (reply.status_code, reply.text) == (200, "data: [DONE]\n\n")


def test_an_error_before_the_first_event_is_a_plain_one() -> None:
    async def full() -> AsyncGenerator[Event, None]:
        raise QueueFull(3, 3)
        yield {}

    reply = answer(full, ends_with_done=True)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "unavailable_error"


def test_a_later_error_is_an_event_and_the_last() -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield {"n": 1}
        raise InvalidRequest("no more")

    reply = answer(failing, ends_with_done=True)
    assert reply.status_code == 200
    assert reply.text == (
        'data: {"n":1}\n\n'
        'data: {"error":{"code":400,"message":"no more","type":"invalid_request_error"}}\n\n'
    )


def test_the_shape_of_a_later_error_is_the_endpoints() -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield {"n": 1}
        raise InvalidRequest("no more")

    def event(error: ApiError) -> Event:
        return named("error", {"why": error.message})

    reply = answer(failing, error_event=event)
    assert reply.text.endswith('event: error\ndata: {"why":"no more"}\n\n')


def test_an_unknown_fault_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield {"n": 1}
        raise KeyError("secret")

    reply = answer(failing)
    assert "server_error" in reply.text
    assert "secret" not in reply.text
    assert "secret" in caplog.text


def test_a_silent_stream_is_pinged_and_begins_with_a_ping() -> None:
    async def slow() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.5)
        yield {"n": 1}
        await asyncio.sleep(0.5)
        yield {"n": 2}

    frames = answer(slow).text.split("\n\n")
    assert frames[0] == ":"
    first, second = frames.index('data: {"n":1}'), frames.index('data: {"n":2}')
    assert 1 <= first <= 3
    assert 1 <= second - first - 1 <= 3
    assert set(frames) == {":", 'data: {"n":1}', 'data: {"n":2}', ""}


def test_a_busy_stream_is_not_pinged() -> None:
    async def busy() -> AsyncGenerator[Event, None]:
        for n in range(8):
            yield {"n": n}
            await asyncio.sleep(0.05)

    assert ":\n" not in answer(busy).text.replace("data: ", "")


def test_a_request_chooses_its_pings() -> None:
    async def slow() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.5)
        yield {"n": 1}

    assert answer(slow, ping_seconds=-1.0).text == 'data: {"n":1}\n\n'
    assert answer(slow, ping_seconds=0.05).text.count(":\n\n") >= 4


def watched(seen: Seen, num_first: int) -> Events:
    """A generator that yields some events, then waits for ever, and tells how it ended."""

    async def events() -> AsyncGenerator[Event, None]:
        try:
            for n in range(num_first):
                yield {"n": n}
            seen.has_begun.set()
            await asyncio.Event().wait()
        except BaseException as error:
            seen.error = error
            raise
        finally:
            seen.has_ended.set()

    return events


@pytest.mark.parametrize("num_first", [0, 3])
def test_a_client_that_leaves_ends_the_generator_before_and_after_the_first_event(
    num_first: int,
) -> None:
    seen = Seen()
    with served(watched(seen, num_first), ping_seconds=-1.0) as address:
        leave_when(address, {}, seen.has_begun.is_set)
        assert seen.has_ended.wait(2.0)
        assert isinstance(seen.error, asyncio.CancelledError)


def test_a_client_that_leaves_while_events_flow_ends_the_generator() -> None:
    seen = Seen()

    async def endless() -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield {"text": "x" * 4096}
                await asyncio.sleep(0)
        finally:
            seen.has_ended.set()

    with served(endless) as address, httpx.Client() as client:
        with client.stream("POST", address, json={}, timeout=5) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            assert not seen.has_ended.is_set()
        assert seen.has_ended.wait(2.0)


def test_work_that_is_not_streamed_is_given_up_when_its_client_leaves() -> None:
    seen = Seen()

    async def work() -> int:
        try:
            seen.has_begun.set()
            await asyncio.Event().wait()
        finally:
            seen.has_ended.set()
        return 1

    async def root(request: Request) -> Response:
        await request.body()
        try:
            return JSONResponse(await unless_gone(request, work()))
        except ClientGone as error:
            seen.error = error
            raise

    app = Starlette(routes=[Route("/", root, methods=["POST"])])
    app.add_exception_handler(ClientGone, lambda _, error: Response(status_code=error.status))
    with listening(app) as address:
        leave_when(address, {}, seen.has_begun.is_set)
        assert seen.has_ended.wait(2.0)
        assert isinstance(seen.error, ClientGone)


def test_work_that_is_not_streamed_has_its_result_and_its_error() -> None:
    async def root(request: Request) -> Response:
        body = await request.json()

        async def work() -> int:
            await asyncio.sleep(0.01)
            return 10 // int(body)

        try:
            return JSONResponse(await unless_gone(request, work()))
        except ZeroDivisionError:
            return JSONResponse("error")

    with listening(Starlette(routes=[Route("/", root, methods=["POST"])])) as address:
        assert httpx.post(address, json=5).json() == 2
        assert httpx.post(address, json=0).json() == "error"


def sent_over(
    events: Events,
    *,
    start_seconds: float = 0.0,
    gone: asyncio.Event | None = None,
    into: list[str] | None = None,
    **more: Any,
) -> list[str]:
    """What an application is told to send by one stream, on a sender that takes its time."""
    sent: list[str] = [] if into is None else into

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(start_seconds)
        sent.append(message["type"].removeprefix("http.response."))

    async def receive() -> Message:
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
        request = Request(scope, receive, send)
        try:
            reply: Response = await event_stream(
                request, events(), QUIET, ends_with_done=True, **more
            )
        except ClientGone as error:
            reply = JSONResponse(error.body, error.status)
        await reply(scope, receive, send)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("seconds", [0.001, 0.03])
def test_a_ping_beside_a_slow_start_neither_overtakes_nor_loses_it(seconds: float) -> None:
    async def events() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(seconds)  # 0.001: the event starts the response, 0.03: a ping does
        yield {"n": 1}

    sent = sent_over(events, start_seconds=0.05, ping_seconds=0.02)
    assert sent[0] == "start" and sent.count("start") == 1 and len(sent) > 3


@pytest.mark.parametrize("num_turns", range(6))
def test_a_client_that_leaves_as_the_first_event_comes_gets_one_start(num_turns: int) -> None:
    gone = asyncio.Event()

    async def events() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.01)
        gone.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        yield {"n": 1}
        await asyncio.sleep(10)

    assert sent_over(events, gone=gone, ping_seconds=-1.0).count("start") == 1


def test_events_begin_before_anything_else_is_prepared_and_may_have_ended_by_then() -> None:
    order: list[str] = []

    class Client(asyncio.Event):
        async def wait(self) -> bool:
            order.append("listened for the client's end")
            return await super().wait()

    async def events() -> AsyncGenerator[Event, None]:
        order.append("the prompt is handed in")
        yield {"n": 1}

    assert sent_over(events, gone=Client()) == ["start", "body", "body", "body"]
    assert order[0] == "the prompt is handed in"


def test_a_ping_that_nobody_takes_is_sent_once_and_ends_with_the_stream() -> None:
    looks = 0

    async def events() -> AsyncGenerator[Event, None]:
        nonlocal looks
        loop, call_later = asyncio.get_running_loop(), asyncio.get_running_loop().call_later

        def counted(delay: float, call: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
            nonlocal looks
            looks += getattr(call, "__name__", "") == "_ping_when_quiet"
            return call_later(delay, call, *args, **more)

        loop.call_later = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        yield {"n": 1}

    # The start takes longer than all that follows: pings come due meanwhile, and are not piled up,
    # nor does anybody look again and again whether one may be sent.
    sent = sent_over(events, start_seconds=0.3, ping_seconds=0.001)
    assert sent[0] == "start" and sent.count("body") <= 4  # a ping, the event, [DONE], the end
    assert looks <= 2


@pytest.mark.parametrize("num_turns", range(4))
def test_an_error_beside_the_first_ping_is_told_whole(num_turns: int) -> None:
    async def events() -> AsyncGenerator[Event, None]:
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.01  # when the ping is due
        while loop.time() < until:
            await asyncio.sleep(0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        raise QueueFull(3, 3)
        yield {}

    sent: list[str] = []
    try:
        sent_over(events, ping_seconds=0.01, into=sent)
    except QueueFull:
        assert not sent  # a plain error
    else:
        assert sent[0] == "start" and sent.count("body") >= 3  # the ping, the error, the end
