"""A server over a tiny random model on the CPU, asked without sockets."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from graphseed.capture import Policy, Selection
from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig, EngineCore
from graphseed.models import Model, load_model
from graphseed.server.app import Application, create_app
from graphseed.server.ledger import Ledger, WatchedEngine
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.settings import ServerSettings
from graphseed.server.state import Served, ServerState

SELECTIONS = {
    "off": Selection(),
    "seed": Selection(Policy.SEED, was_asked=True, source="test"),
    "resident": Selection(Policy.RESIDENT, was_asked=True, source="test"),
}


@functools.cache
def model_of(preset: str) -> Model:
    return load_model(
        f"random:{preset}",
        device="cpu",
        dtype="fp32",
        bf16_is_fast=False,
        progress=False,
        takes_rerankers=True,
    )


@dataclass
class Server:
    """One server in this process."""

    state: ServerState
    lifecycle: Lifecycle
    app: Application
    http: TestClient  # for tests that are no coroutines

    @property
    def engine(self) -> WatchedEngine:
        engine = self.state.ready.engine
        assert isinstance(engine, WatchedEngine)
        return engine

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(path, **more)

    def client(self) -> httpx.AsyncClient:
        """For tests that are coroutines; close it."""
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60.0)


MakeServer = Callable[..., Server]


@pytest.fixture
def anyio_backend() -> str:
    """What tests marked `anyio` run on."""
    return "asyncio"


def load_served(ledger: Ledger, policy: str, preset: str, config: EngineConfig) -> Served:
    """A model that answers, as the command line makes it."""
    model = model_of(preset)
    core = EngineCore(model, open_driver("cpu"), config, SELECTIONS[policy])
    return Served(WatchedEngine(core, ledger), model)


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """`make_server(**settings)`: also policy, preset, is_loaded, and sizes of an EngineConfig."""
    made: list[Server] = []

    def make(
        policy: str = "off", preset: str = "tiny-llama", is_loaded: bool = True, **more: Any
    ) -> Server:
        names = ("context_len", "num_ubatch", "num_parallel", "kv_len", "max_waiting")
        sizes = {name: more.pop(name) for name in names if name in more}
        sizes = {"context_len": 256, "num_ubatch": 32, "num_parallel": 2, **sizes}
        settings = ServerSettings(**more)
        config = EngineConfig(
            embeds=settings.embeds, reuses_prefixes=settings.caches_prompts, **sizes
        )
        state = ServerState(settings, SELECTIONS[policy], "b0-test", "tiny.gguf")
        ledger = Ledger()
        load = functools.partial(load_served, ledger, policy, preset, config)
        lifecycle = Lifecycle(state, load, ledger=ledger)
        if is_loaded:
            state.served = load()
        app = create_app(state, lifecycle)
        made.append(Server(state, lifecycle, app, TestClient(app, base_url="http://server")))
        return made[-1]

    yield make
    for server in made:
        if server.state.served is not None:
            server.state.served.engine.close()


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """A server with nothing special about it."""
    return make_server()


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream that say something."""
    async for line in response.aiter_lines():
        if line:
            yield line
