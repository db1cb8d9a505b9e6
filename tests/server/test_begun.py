"""Prompts that are handed in ahead of their stream: who owns them, and when the head goes out."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

import graphseed.server.wire.jobs as jobs
from graphseed.engine import (
    AsyncHandle,
    DeadlineExceeded,
    Engine,
    QueueFull,
    SamplingParams,
    Status,
)
from graphseed.engine import Request as EngineRequest
from graphseed.server.errors import InvalidRequest
from graphseed.server.generation import GenerateOptions, Generation
from graphseed.server.settings import ServerSettings
from graphseed.server.wire.jobs import Begun, begin
from graphseed.server.wire.sse import Event, event_stream
from tests.server.small import Small, small_server

PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)
IDS = [65] * 8
STREAMS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": IDS, "n_predict": 400},
    "/v1/completions": {"prompt": IDS, "max_tokens": 400},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
    "/v1/responses": {"input": "a", "max_output_tokens": 400},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
}


@pytest.fixture
def server() -> Iterator[Small]:
    with small_server(context_len=512, num_parallel=1, max_waiting=0) as server:
        yield server


def generation_of(engine: Engine) -> Generation:
    return Generation(engine, IDS, GenerateOptions(PARAMS))


async def is_free(server: Small) -> bool:
    """Whether nobody waits for anything, in the ledger at once and in the engine soon."""
    if server.ledger.num_open:
        return False
    for _ in range(300):
        if server.state.ready.engine.num_open == 0:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("statuses", "has_news", "expected"),
    [
        ("prefill", False, True), ("prefill prefill", False, True), ("waiting", False, False),
        ("prefill waiting", False, False), ("prefill", True, False), ("failed", True, False),
    ],
)  # fmt: skip
def test_what_all_runs_and_has_nothing_to_read_is_running(
    statuses: str, has_news: bool, expected: bool
) -> None:
    async def run() -> Begun:
        def news() -> asyncio.Future[None]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if has_news:
                future.set_result(None)
            return future

        fakes: Any = [
            SimpleNamespace(begin=news, request=SimpleNamespace(status=Status(status)))
            for status in statuses.split()
        ]
        return await begin(fakes)

    assert asyncio.run(run()).are_running is expected


def test_the_second_that_finds_the_queue_full_ends_the_first_too(server: Small) -> None:
    engine = server.state.ready.engine

    async def run() -> None:
        generations = [generation_of(engine), generation_of(engine)]
        with pytest.raises(QueueFull):
            await begin(generations)
        assert await is_free(server)

    asyncio.run(run())


def test_who_is_cancelled_as_it_begins_leaves_nothing_open(
    server: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "HEAD_START", 60.0)
    engine, held = server.state.ready.engine, threading.Event()

    async def run() -> None:
        asyncio.get_running_loop().run_in_executor(None, engine.call, held.wait)
        await asyncio.sleep(0.05)
        task = asyncio.create_task(begin([generation_of(engine)]))
        await asyncio.sleep(0.02)
        assert server.ledger.num_open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.set()
        assert await is_free(server)

    asyncio.run(run())


def dropped_here(handle: list[AsyncHandle]) -> None:
    handle.clear()


def dropped_on_another_thread(handle: list[AsyncHandle]) -> None:
    thread = threading.Thread(target=handle.clear)
    thread.start()
    thread.join()


def dropped_in_a_cycle(handle: list[AsyncHandle]) -> None:
    cycle: list[Any] = [handle[0]]
    cycle.append(cycle)
    handle.clear()
    del cycle
    gc.collect()


@pytest.mark.parametrize("drop", [dropped_here, dropped_on_another_thread, dropped_in_a_cycle])
def test_a_handle_that_is_dropped_gives_its_request_up_and_says_so(
    server: Small, drop: Callable[[list[AsyncHandle]], None]
) -> None:
    engine, threads = server.state.ready.engine, list[int]()

    async def run() -> None:
        server.ledger.on_left(lambda _: threads.append(threading.get_ident()))
        handle = [engine.aread(engine.core.request(IDS, PARAMS))]
        assert server.ledger.num_open == 1
        drop(handle)
        await asyncio.sleep(0.01)
        assert await is_free(server)

    asyncio.run(run())
    assert threads == [threading.get_ident()]


def test_a_handle_needs_a_loop_and_leaves_the_request_as_it_was(server: Small) -> None:
    engine = server.state.ready.engine
    request: EngineRequest = engine.core.request(IDS, SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="no running event loop"):
        engine.aread(request)
    gc.collect()
    assert server.ledger.num_open == 0 and [delta for delta in engine.start(request)]


def test_an_error_ends_the_reading_at_once(server: Small) -> None:
    engine = server.state.ready.engine

    async def run() -> None:
        request = engine.core.request(IDS, PARAMS)
        request.set_deadline(1e-6)
        handle = engine.aread(request)
        with pytest.raises(DeadlineExceeded):
            async for _ in handle:
                pass
        assert server.ledger.num_open == 0
        assert [delta async for delta in handle] == []

    asyncio.run(run())


async def call(app: Any, path: str, send: Callable[[Message], Awaitable[None]]) -> None:
    """One POST whose body is here, and whose client leaves when a send has waited a while."""
    raw = json.dumps(STREAMS[path] | {"stream": True, "ignore_eos": True}).encode()
    messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "",
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 10)


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("path", STREAMS)
def test_a_head_that_cannot_be_sent_leaves_nothing_open(
    server: Small, path: str, blocks: bool, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(_: Message) -> None:
        if blocks:
            await asyncio.Event().wait()
        raise OSError("gone")

    async def begun(generations: list[Generation]) -> Begun:
        return Begun((await begin(generations)).generations, is_running)

    for name in ("text.completions", "dialects.chat", "dialects.responses", "dialects.anthropic"):
        monkeypatch.setattr(f"graphseed.server.{name}.begin", begun)

    async def run() -> None:
        gc.disable()  # nothing may depend on when it runs
        try:
            await call(server.app, path, send)
            assert await is_free(server)
        finally:
            gc.enable()

    asyncio.run(run())


def sent_by(events: Callable[[list[Message]], Event], are_running: bool) -> list[Message]:
    """What one stream of one event sends; `events` makes it of what was sent before."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    async def one() -> AsyncGenerator[Event, None]:
        yield events(sent)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
        stream = await event_stream(
            Request(scope, receive, send), one(), ServerSettings(), ends_with_done=False,
            begun=Begun((), are_running),
        )  # fmt: skip
        await stream(scope, receive, send)

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("are_running", [True, False])
def test_the_head_of_what_runs_does_not_wait_for_the_first_event(are_running: bool) -> None:
    start, event, _ = sent_by(lambda sent: {"heads": len(sent)}, are_running)
    assert start["type"] == "http.response.start" and start["status"] == 200
    assert event["body"] == b'data: {"heads":%d}\n\n' % are_running


def test_an_error_of_what_runs_is_an_event_and_of_what_waits_a_status() -> None:
    def failing(_: list[Message]) -> Event:
        raise InvalidRequest("no more")

    start, event, end = sent_by(failing, are_running=True)
    assert start["status"] == 200 and b'"message":"no more"' in event["body"]
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}
    with pytest.raises(InvalidRequest):
        sent_by(failing, are_running=False)
