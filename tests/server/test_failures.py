"""What goes wrong in the engine, as clients and whoever supervises the process see it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from graphseed.capture import DeviceLost
from graphseed.drivers.host import HostArena
from graphseed.server.errors import of_exception
from graphseed.server.listen import EngineFailed
from tests.cli.test_serve import ROOT, TINY, Running
from tests.server.test_lifecycle import start, until

pytestmark = pytest.mark.anyio

UNLUCKY = 77  # a token: the step that has it goes wrong
LOST = "the device was lost; the server must be started again"
BODY = {"prompt": [5] * 20, "n_predict": 100, "temperature": 0, "ignore_eos": True, "stream": True}


def break_steps(monkeypatch, engine, error: Exception) -> None:
    """Let every step fail that has the token."""
    run = engine.core.runner.run

    def unlucky(plan, observer=None):
        if any(UNLUCKY in part.token_ids for part in plan.parts):
            raise error
        return run(plan, observer)

    monkeypatch.setattr(engine.core.runner, "run", unlucky)


async def events_of(http, body):
    async with http.stream("POST", "/completion", json=body) as response:
        if response.status_code != 200:
            return [json.loads(await response.aread())]
        return [json.loads(line[6:]) async for line in response.aiter_lines() if line]


async def test_an_error_of_a_step_ends_its_requests_and_no_other(make_server, monkeypatch, caplog):
    server = make_server(num_predict=-1)
    break_steps(monkeypatch, server.engine, ZeroDivisionError("the secret reason"))
    address, task = await start(server)
    async with httpx.AsyncClient(base_url=address, timeout=30) as http:
        running = asyncio.create_task(events_of(http, BODY))
        (broken,) = await events_of(http, {**BODY, "prompt": [UNLUCKY] * 20})
        assert broken["error"]["code"] == 500 and "secret" not in str(broken)
        events = await running
        assert events[-1]["stop_type"] == "limit" and len(events) == 101
        again = await events_of(http, {**BODY, "n_predict": 3})
        assert [one.get("tokens") for one in again[:3]] == [one["tokens"] for one in events[:3]]
        assert (await http.get("/health")).status_code == 200
    signal.raise_signal(signal.SIGTERM)
    assert await task is False
    assert "the secret reason" in caplog.text


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (DeviceLost("gone"), DeviceLost, "gone"),
        (KeyError("a fault"), EngineFailed, "the engine has ended: KeyError"),
    ],
)
async def test_an_engine_that_ends_ends_what_is_open_refuses_what_comes_and_the_server(
    make_server, monkeypatch, error, raised, told
):
    server = make_server(num_predict=-1, context_len=2048)
    if isinstance(error, DeviceLost):
        break_steps(monkeypatch, server.engine, error)
    else:
        step = server.engine.core.step

        def faulty():
            if any(UNLUCKY in s.tokens for s in server.engine.core.scheduler.sequences):
                raise error
            return step()

        monkeypatch.setattr(server.engine.core, "step", faulty)
    monkeypatch.setattr("graphseed.server.lifecycle.WATCH_SECONDS", 0.5)
    expected = of_exception(error).body["error"]
    address, task = await start(server)
    async with httpx.AsyncClient(base_url=address, timeout=30) as http:
        running = asyncio.create_task(events_of(http, {**BODY, "n_predict": 2000}))
        await until(lambda: server.engine.num_open)
        (broken,) = await events_of(http, {**BODY, "prompt": [UNLUCKY] * 20})
        assert broken["error"] == expected
        for path in ("/completion", "/health"):
            method = "GET" if path == "/health" else "POST"
            response = await http.request(method, path, json=BODY)
            assert response.json()["error"]["message"] == expected["message"], path
            assert response.status_code in (500, 503)
        assert (await running)[-1]["error"] == expected
    with pytest.raises(raised, match=told):
        await task


def test_a_process_whose_device_is_lost_says_so_once_and_exits_with_1(tmp_path):
    program = f"""
import sys
from graphseed.capture import DeviceLost
from graphseed.cli.main import main
from graphseed.engine.step import StepRunner
run = StepRunner.run
def lost(self, plan, observer=None):
    if any({UNLUCKY} in part.token_ids for part in plan.parts):
        raise DeviceLost("the device was lost in a prompt step")
    return run(self, plan, observer)
StepRunner.run = lost
sys.exit(main({["serve", *TINY, "--port", "0", "-c", "512"]!r}))
"""
    log = tmp_path / "stderr"
    with log.open("w", encoding="utf-8") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stderr=err,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
    try:
        server = Running(process, log)
        address = server.address()
        server.wait_for("the model is loaded: ready")
        response = httpx.post(f"{address}/completion", json={"prompt": [UNLUCKY] * 4}, timeout=30)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == LOST
        assert process.wait(20) == 1
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in server.log
    assert server.log.endswith("error: the device was lost in a prompt step\n")


async def test_a_long_capture_delays_answers_and_neither_health_nor_the_page(
    make_server, monkeypatch
):
    server = make_server(policy="seed")
    capture = HostArena.capture

    def slow(arena, work):
        time.sleep(1.5)
        return capture(arena, work)

    monkeypatch.setattr(HostArena, "capture", slow)
    address, task = await start(server, drain_seconds=20)
    async with httpx.AsyncClient(base_url=address, timeout=30) as http:
        begun = time.monotonic()
        running = [asyncio.create_task(events_of(http, {**BODY, "n_predict": 8})) for _ in "ab"]
        await until(lambda: server.engine.num_open == 2)
        for path in ("/health", "/v1/models", "/props", "/prompt-graphs", "/"):
            assert (await http.get(path)).status_code == 200
        assert time.monotonic() - begun < 1.0  # none of them waited for the capture
        for events in await asyncio.gather(*running):
            assert len(events) == 9 and events[-1]["stop_type"] == "limit"
        assert time.monotonic() - begun > 1.4
    signal.raise_signal(signal.SIGTERM)
    assert await task is False
