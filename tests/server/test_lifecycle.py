"""Loading, sleeping, waking and the end."""

import asyncio
import contextlib
import json
import signal
import socket

import httpx
import pytest

from graphseed.server.errors import Failed, Unavailable
from graphseed.server.ledger import CURRENT, HttpRecord, Ledger
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.listen import CannotListen, ListenOptions, address_of, bind, serve
from graphseed.server.settings import ServerSettings
from graphseed.server.state import ServerState
from tests.server.conftest import SELECTIONS

pytestmark = pytest.mark.anyio

BODY = {"prompt": "x" * 20, "n_predict": 3, "temperature": 0}
LONG = {"prompt": "x" * 20, "n_predict": 200, "ignore_eos": True, "stream": True}


async def until(question, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not question():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def falling_asleep(server):
    task = asyncio.create_task(server.lifecycle.sleep_when_idle())
    try:
        yield
    finally:
        task.cancel()


async def test_a_loaded_model_is_told_to_whoever_asked_and_then_answers(make_server):
    server = make_server(is_loaded=False)
    told = []
    server.lifecycle.on_loaded(lambda served: told.append((served, server.state.served)))
    assert server.lifecycle.facts is None
    await server.lifecycle.load()
    assert told == [(server.state.served, None)]  # before anybody can ask it
    async with server.client() as http:
        assert (await http.get("/health")).status_code == 200


async def test_an_idle_server_sleeps_and_tells_what_it_told_awake(make_server):
    server = make_server(sleep_idle_seconds=0.2)
    engine = server.engine
    async with server.client() as http:
        awake = [(await http.get(path)).json() for path in ("/props", "/models")]
        async with falling_asleep(server):
            await until(lambda: server.state.is_sleeping and server.state.served is None)
            with pytest.raises(Exception, match="closed"):
                engine.call(lambda: None)
            assert (await http.get("/health")).json() == {"status": "ok"}
            asleep = [(await http.get(path)).json() for path in ("/props", "/models")]
    assert asleep[0].pop("is_sleeping") is True and awake[0].pop("is_sleeping") is False
    for props in (awake[0], asleep[0]):
        props["prompt_graphs"].pop("summary")
    assert asleep[0] == awake[0]
    assert asleep[1]["data"][0]["meta"] == awake[1]["data"][0]["meta"]
    assert server.state.is_sleeping  # none of these woke it


async def test_requests_that_come_together_wake_it_once_and_are_answered_as_before(make_server):
    server = make_server(sleep_idle_seconds=0.2)
    num_loaded = 0

    def count(_):
        nonlocal num_loaded
        num_loaded += 1

    async with server.client() as http:
        before = (await http.post("/completion", json=BODY)).json()["content"]
        async with falling_asleep(server):
            await until(lambda: server.state.is_sleeping and server.state.served is None)
            assert (await http.get("/nothing")).status_code == 404
            assert server.state.is_sleeping
            server.lifecycle._on_loaded.append(count)
            answers = await asyncio.gather(*(http.post("/completion", json=BODY) for _ in range(3)))
            assert [answer.json()["content"] for answer in answers] == [before] * 3
            assert num_loaded == 1
            assert (await http.get("/props")).json()["is_sleeping"] is False
            await until(lambda: server.state.is_sleeping and server.state.served is None)


async def test_it_does_not_sleep_while_anything_runs(make_server):
    server = make_server(sleep_idle_seconds=0.2)
    params = server.state.settings.defaults
    request = server.engine.core.request([65] * 8, params)
    deltas = server.engine.aread(request)
    await anext(deltas)
    async with falling_asleep(server):
        CURRENT.set(HttpRecord("POST", "/tokenize"))
        await server.lifecycle.need()
        await asyncio.sleep(0.5)
        assert not server.state.is_sleeping
        server.lifecycle.no_longer()
        await asyncio.sleep(0.5)
        assert not server.state.is_sleeping  # somebody reads the answer still
        await deltas.aclose()
        await until(lambda: server.state.is_sleeping)


async def test_a_model_that_cannot_be_loaded_again_is_an_error_and_is_tried_again(caplog):
    state = ServerState(ServerSettings(), SELECTIONS["off"], "b0", "m", is_sleeping=True)
    num_tried = 0

    def load():
        nonlocal num_tried
        num_tried += 1
        raise MemoryError("secret details")

    lifecycle = Lifecycle(state, load)
    for expected in (1, 2):
        with pytest.raises(Failed, match="could not be loaded again"):
            await lifecycle.need()
        assert num_tried == expected
    assert state.is_sleeping and "secret details" in caplog.text


async def test_draining_waits_for_running_answers_and_no_longer_than_it_may(make_server):
    server = make_server()
    request = server.engine.core.request([65] * 8, server.state.settings.defaults)
    deltas = server.engine.aread(request)
    await anext(deltas)
    assert not await server.lifecycle.drain(0.1)
    with pytest.raises(Unavailable):
        _ = server.state.ready
    draining = asyncio.create_task(server.lifecycle.drain(10))
    await deltas.aclose()
    assert await draining
    await server.lifecycle.close()
    await server.lifecycle.close()


async def test_closing_calls_close_and_then_release_when_nobody_refers_to_the_model(make_server):
    import gc
    import weakref

    server = make_server()
    engine = weakref.ref(server.engine)
    calls = []

    def close(served):
        served.engine.close()
        calls.append("close")

    def release():
        gc.collect()
        calls.append("release" if engine() is None else "release too early")

    lifecycle = Lifecycle(server.state, close=close, release=release, ledger=Ledger())
    await lifecycle.close()
    assert calls == ["close", "release"]


# Sockets and signals


def test_addresses_are_taken_together_or_not_at_all():
    (first,) = bind(["127.0.0.1"], 0)
    host, port = first.getsockname()
    assert address_of(first) == f"http://127.0.0.1:{port}"
    first.listen()
    with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1, port {port}"):
        bind(["127.0.0.1"], port)
    with pytest.raises(CannotListen, match="--port 0 goes with one address"):
        bind(["127.0.0.1", "::1"], 0)
    with pytest.raises(CannotListen, match="cannot listen on no.such.host.invalid"):
        bind(["no.such.host.invalid"], port)
    first.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        with pytest.raises(CannotListen, match="127.0.0.2"):
            blocker = socket.create_server(("127.0.0.2", busy))
            try:
                bind(["127.0.0.3", "127.0.0.2"], busy)
            finally:
                blocker.close()
        (again,) = bind(["127.0.0.3"], busy)  # the first address was given back
        again.close()


async def start(server, hosts=("127.0.0.1",), **options):
    """A server on real sockets; returns its first address and its task."""
    sockets = bind(hosts, 0)
    address = address_of(sockets[0])
    task = asyncio.create_task(
        serve(server.app, server.lifecycle, sockets, ListenOptions(**options))
    )
    await asyncio.sleep(0)
    return address, task


async def test_health_answers_503_while_the_model_loads_and_200_when_it_is_there(make_server):
    server = make_server(is_loaded=False)
    load, may_go_on = server.lifecycle._load, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_load():
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(10)
        return load()

    server.lifecycle._load = slow_load
    address, task = await start(server)
    async with httpx.AsyncClient(base_url=address) as http:
        response = await http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "Loading model"
        may_go_on.set()
        await until(lambda: server.state.served is not None)
        assert (await http.get("/health")).status_code == 200
    signal.raise_signal(signal.SIGTERM)
    assert await task is False


async def test_a_stream_that_runs_at_sigterm_ends_cleanly_and_new_requests_are_refused(
    make_server,
):
    server = make_server(num_predict=-1)
    address, task = await start(server, drain_seconds=20)
    async with (
        httpx.AsyncClient(base_url=address, timeout=30) as http,
        http.stream("POST", "/completion", json=LONG) as response,
    ):
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: server.state.is_closing)
        refused = await http.post("/completion", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the server is shutting down"
        events = [json.loads(line[6:]) async for line in lines if line]
    assert events[-1]["stop"] is True and events[-1]["stop_type"] == "limit"
    assert events[-1]["tokens_predicted"] == 200
    assert await task is False
    assert server.state.served is None


async def test_a_stream_that_outlives_the_time_it_has_is_ended_with_an_error_event(make_server):
    server = make_server(context_len=2048)
    address, task = await start(server, drain_seconds=0.1)
    body = {**LONG, "n_predict": 2000}
    async with (
        httpx.AsyncClient(base_url=address, timeout=30) as http,
        http.stream("POST", "/completion", json=body) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        signal.raise_signal(signal.SIGINT)
        events = [json.loads(line[6:]) async for line in lines if line]
    assert events[-1]["error"]["type"] == "unavailable_error"
    assert await task is False


async def test_a_unix_socket_is_listened_on_and_taken_away_at_the_end(make_server, tmp_path):
    server = make_server()
    path = tmp_path / "graphseed.sock"
    address, task = await start(server, hosts=(str(path),))
    assert address == f"unix://{path}"
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        assert (await http.get("/health")).status_code == 200
    signal.raise_signal(signal.SIGTERM)
    await task
    assert not path.exists()


async def test_what_prevents_loading_ends_the_server_and_is_raised():
    state = ServerState(ServerSettings(), SELECTIONS["off"], "b0", "m")

    def load():
        raise RuntimeError("no such model")

    from graphseed.server.app import create_app

    lifecycle = Lifecycle(state, load)
    with pytest.raises(RuntimeError, match="no such model"):
        await serve(create_app(state, lifecycle), lifecycle, bind(["127.0.0.1"], 0))
