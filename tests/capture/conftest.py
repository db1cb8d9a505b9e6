"""Identities, works and a transcript for policy tests."""

from collections.abc import Callable

import pytest

from graphseed.capture import Event, EventLog, FirstNode, GraphIdentity, Namespace
from graphseed.testing.scripted import ScriptedDriver

MakeIdentity = Callable[..., GraphIdentity]


@pytest.fixture
def make_identity() -> MakeIdentity:
    def make(
        namespace: Namespace = Namespace.PROMPT, tokens: int = 512, batch: int = 1, **more: object
    ) -> GraphIdentity:
        first = FirstNode("aten.embedding", (1, tokens, 64), "float32")
        structure = (("tokens", tokens), ("batch", batch), *more.items())
        return GraphIdentity(namespace, "scripted", first, structure)  # type: ignore[arg-type]

    return make


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver()


@pytest.fixture
def log() -> EventLog:
    return EventLog()


@pytest.fixture
def events(log: EventLog) -> list[Event]:
    seen: list[Event] = []
    log.subscribe(seen.append)
    return seen
