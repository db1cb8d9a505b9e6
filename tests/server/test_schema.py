"""Whether the server answers as its OpenAPI document says, whatever it is asked.

Bodies are made up by schemathesis out of the document, right ones and wrong ones. What this server
cannot do is a declared answer (501), as is being busy (503); a fault of ours (500 without a reason)
never is, declared or not.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from graphseed.capture import Selection
from graphseed.server.app import create_app
from graphseed.server.settings import ServerSettings
from graphseed.server.state import ServerState
from tests.server.small import DEFAULTS, Small, small_server

CHECKED = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
Served = tuple[Small, Any]
MODES = {"right": GenerationMode.POSITIVE, "wrong": GenerationMode.NEGATIVE}
SHAPE = {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
NO_JSON = "the body is no JSON"  # which llama-server answers with 500


def _operations() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Those of the document, and those of them that a request can get wrong."""
    state = ServerState(ServerSettings(), Selection(), "b0", "m")
    found = {
        (method.upper(), path): operation
        for path, operations in create_app(state).openapi()["paths"].items()
        for method, operation in operations.items()
    }
    takes = [name for name, told in found.items() if {"requestBody", "parameters"} & set(told)]
    return list(found), takes


ALL, TAKING = _operations()
PROBES = [("right", *one) for one in ALL] + [("wrong", *one) for one in TAKING]


@pytest.fixture(scope="module")
def make_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """A server with everything switched on ("able"), or one that answers much with 501."""
    able = {
        "has_metrics": True, "has_props": True, "embeds": True,
        "slot_save_path": tmp_path_factory.mktemp("slots"),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:

        @functools.cache
        def make(kind: str) -> Served:
            more: dict[str, Any] = able if kind == "able" else {}
            told = ServerSettings(num_predict=2, defaults=DEFAULTS, **more)
            server = stack.enter_context(small_server(told, context_len=96, max_waiting=6))
            return server, schemathesis.openapi.from_asgi("/openapi.json", server.app)

        yield make


def check_answers(served: Served, mode: str, method: str, path: str, num_examples: int) -> None:
    server, schema = served

    # Without a database of examples: it would be a file in the tree.
    @settings(
        max_examples=num_examples, derandomize=True, database=None, deadline=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=schema[path][method].as_strategy(generation_mode=MODES[mode]))
    def answers(case: Case) -> None:
        response = case.call()
        case.validate_response(response, checks=CHECKED)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["code"] == response.status_code
            assert response.status_code != 500 or error["message"].startswith(NO_JSON), error

    answers()
    server.wait_until_idle()


@pytest.mark.parametrize(("mode", "method", "path"), PROBES)
def test_a_few_bodies_are_answered_as_the_document_says(make_served, mode, method, path):
    check_answers(make_served("able"), mode, method, path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["able", "plain"])
@pytest.mark.parametrize(("mode", "method", "path"), PROBES)
def test_many_bodies_are_answered_as_the_document_says(make_served, kind, mode, method, path):
    check_answers(make_served(kind), mode, method, path, 100)


def test_these_checks_find_what_the_document_does_not_say():
    """A status, a shape, and a fault that it does not have."""
    from starlette.responses import JSONResponse

    answer: Any = None
    with small_server() as server:

        @server.app.fastapi.get("/probe", responses={200: {"content": {"application/json": SHAPE}}})
        async def probe() -> Any:
            return JSONResponse(*answer)

        server.app.fastapi.openapi_schema = None
        served = server, schemathesis.openapi.from_asgi("/openapi.json", server.app)
        answer = {"a": 1}, 200
        check_answers(served, "right", "GET", "/probe", 1)
        fault = {"error": {"code": 500, "message": "x", "type": "server_error"}}
        teapot = {"error": {"code": 418, "message": "x", "type": "y"}}
        for answer in (({"a": "1"}, 200), (teapot, 418), (fault, 500), ({}, 503)):  # noqa: B007
            with pytest.raises((BaseExceptionGroup, AssertionError, KeyError)):
                check_answers(served, "right", "GET", "/probe", 1)
