"""The application: every endpoint behind one gate, and every error an error object.

Owns create_app, the list of the endpoints' modules, and what becomes of exceptions. Does not know
any endpoint's shape.
"""

import json
import logging
from collections.abc import Mapping
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import graphseed
from graphseed.capture.errors import GraphseedError
from graphseed.server import absent, status
from graphseed.server.conversation import templates
from graphseed.server.dialects import anthropic, chat, responses
from graphseed.server.errors import ApiError, Failed, InvalidRequest, NotFound, of_exception
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.middleware import Gate, Prefixed
from graphseed.server.slots import endpoint
from graphseed.server.state import ServerState
from graphseed.server.text import completions, embeddings, rerank, tokens
from graphseed.server.watch import metrics, page, prompt_graphs
from graphseed.server.wire.replies import ERROR_SCHEMA, ERROR_STATUSES, json_reply

# Each module has `router(state)`, or `router(state, lifecycle)` where it must know of every model
# that is loaded (`lifecycle.on_loaded`) or of the engine's requests (`lifecycle.ledger`).
# These need the model: a request to one of them wakes it.
ROUTERS: Final = (
    endpoint, completions, tokens, embeddings, rerank, chat, responses, anthropic, templates,
)  # fmt: skip
# These answer while it sleeps.
WAKEFUL_ROUTERS: Final = (absent, metrics, prompt_graphs, page)

logger = logging.getLogger("graphseed.server")

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    number: {
        "description": text,
        "content": {"application/json": {"schema": ERROR_SCHEMA}},
    }
    for number, text in ERROR_STATUSES.items()
}


def create_app(
    state: ServerState, lifecycle: Lifecycle | None = None, *, prefix: str = ""
) -> FastAPI:
    """The server's ASGI application. Without a lifecycle, the state's model is what there is.

    `prefix` stands before every path.
    """
    lifecycle = lifecycle or Lifecycle(state)

    async def awake() -> None:
        await lifecycle.need()

    app = FastAPI(
        title="graphseed", version=graphseed.__version__, docs_url=None, redoc_url=None,
        redirect_slashes=False, responses=_ERRORS, strict_content_type=False,
    )  # fmt: skip
    needs_model = [Depends(awake)]
    graph_state = partial(prompt_graphs.describe, watch=lifecycle.graphs)
    app.include_router(status.router(state, lifecycle, graph_state))
    for module in ROUTERS:
        app.include_router(_routes_of(module, state, lifecycle), dependencies=needs_model)
    for module in WAKEFUL_ROUTERS:
        app.include_router(_routes_of(module, state, lifecycle))
    _add_handlers(app)
    page_paths = frozenset(page.PUBLIC_PATHS)
    app.add_middleware(Gate, state=state, lifecycle=lifecycle, page_paths=page_paths)
    if prefix:
        app.add_middleware(Prefixed, prefix=prefix)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _routes_of(module: ModuleType, state: ServerState, lifecycle: Lifecycle) -> APIRouter:
    takes_both = len(signature(module.router).parameters) > 1
    routes: APIRouter = module.router(state, lifecycle) if takes_both else module.router(state)
    return routes


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(GraphseedError)
    async def known(_: Request, error: Exception) -> JSONResponse:
        told = of_exception(error)
        if isinstance(told, Failed) and told is not error:
            logger.error("a request failed in the engine", exc_info=error)
        return _reply(told.body, told.status, told.headers)

    @app.exception_handler(HTTPException)
    async def by_framework(_: Request, error: HTTPException) -> Response:
        return _of_http_exception(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _of_validation(error)

    @app.exception_handler(json.JSONDecodeError)
    async def malformed(_: Request, error: json.JSONDecodeError) -> JSONResponse:
        return json_reply(Failed(f"the body is no JSON: {error}").body, 500)  # as llama-server


def _of_http_exception(error: HTTPException) -> JSONResponse:
    told: ApiError = InvalidRequest(str(error.detail))
    if error.status_code == 404:
        told = NotFound("File Not Found")
    body = told.body
    body["error"]["code"] = error.status_code
    return _reply(body, error.status_code, error.headers or {})


def _reply(body: dict[str, Any], status: int, headers: Mapping[str, str]) -> JSONResponse:
    reply = json_reply(body, status)
    reply.headers.update(headers)
    return reply


def _of_validation(error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return json_reply(Failed("the body is no JSON").body, 500)
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    given = f" is {first['input']!r:.80}" if "input" in first and first["type"] != "missing" else ""
    return json_reply(InvalidRequest(f"{where}{given}: {first['msg']}").body, 400)


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without the status that FastAPI declares and this server never has."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in made["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema
