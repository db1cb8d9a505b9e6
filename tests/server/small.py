"""A small server for tests: a real engine on a tiny random model, behind the real application."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from graphseed.capture import Selection
from graphseed.engine import EngineConfig, EngineCore, SamplingParams
from graphseed.server.app import Application, create_app
from graphseed.server.connection import Connection
from graphseed.server.ledger import Ledger
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.settings import ServerSettings
from graphseed.server.state import ServerState
from tests.server.conftest import load_served

DEFAULTS = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=42)


@dataclass
class Small:
    """One server."""

    state: ServerState
    ledger: Ledger
    app: Application
    client: TestClient

    @property
    def core(self) -> EngineCore:
        return self.state.ready.engine.core

    def post(self, path: str, **body: Any) -> Any:
        """The answer's JSON; the status must be 200."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error object; the status must be `status`."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert error["code"] == status
        assert isinstance(error, dict)
        return error

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, `[DONE]` as that text."""
        reply = self.client.post(path, json={**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return events_of(reply.text)

    def wait_until_idle(self, seconds: float = 2.0) -> None:
        """Fail unless every slot and block is free within the time."""
        core, until = self.core, time.monotonic() + seconds
        while not core.scheduler.is_idle:
            assert time.monotonic() < until, "a request still runs"
            time.sleep(0.01)


def events_of(text: str) -> list[Any]:
    frames = [frame for frame in text.split("\n\n") if frame and frame != ":"]
    assert all(frame.startswith("data: ") for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


@contextlib.contextmanager
def small_server(settings: ServerSettings | None = None, **sizes: int) -> Iterator[Small]:
    config = EngineConfig(**{"context_len": 256, "num_ubatch": 32, "num_parallel": 2, **sizes})  # type: ignore[arg-type]
    settings = settings or ServerSettings(num_predict=8, defaults=DEFAULTS)
    ledger = Ledger()
    state = ServerState(settings, Selection(), build="b1-test", model_path="tiny.gguf")
    state.served = load_served(ledger, "off", "tiny-llama", config)
    app = create_app(state, Lifecycle(state, ledger=ledger))
    with state.served.engine:
        yield Small(state, ledger, app, TestClient(app))


def leave_when(url: str, body: dict[str, Any], is_due: Callable[[], bool]) -> None:
    """Post a request and close the connection once `is_due`, however long that takes here.

    A time after which to leave would be too short on a busy machine and too long on a fast one.
    """

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            asked = asyncio.create_task(client.post(url, json=body))
            while not is_due():
                assert not asked.done(), "it was answered before its client left"
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait([asked])

    asyncio.run(ask())


@contextlib.contextmanager
def listening(app: ASGIApp, **more: Any) -> Iterator[str]:
    """Serve an app on a free port of the loopback interface; yields its address.

    Connections are those of `graphseed serve`; `more` is for uvicorn's configuration.
    """
    # Without its protocol asyncio leaves Nagle's algorithm on: 40 ms for each answer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(app, http=Connection, log_level="error", lifespan="off", **more)
        )
        thread = threading.Thread(target=server.run, args=([free],), daemon=True)
        thread.start()
        until = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
