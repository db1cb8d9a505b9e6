"""The application: every endpoint behind one gate, and every error an error object.

Owns create_app, the list of the endpoints' modules, and the order of the layers around FastAPI:
they are not its middleware, since what it does before its first middleware would take a good part
of the time to a first token. Does not know any endpoint's shape.
"""

from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import graphseed
from graphseed.server import absent, status
from graphseed.server.conversation import templates
from graphseed.server.dialects import anthropic, chat, responses
from graphseed.server.errors import Failed
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.middleware import INTERNAL, Gate, Prefixed
from graphseed.server.shortcut import Endpoint, Shortcut, short_routes
from graphseed.server.slots import endpoint
from graphseed.server.state import ServerState
from graphseed.server.text import completions, embeddings, rerank, tokens
from graphseed.server.told import TOLD, reply_to
from graphseed.server.watch import metrics, page, prompt_graphs
from graphseed.server.wire.replies import ERROR_SCHEMA, ERROR_STATUSES

# Each module has `router(state)`, or `router(state, lifecycle)` where it must know of every model
# that is loaded (`lifecycle.on_loaded`) or of the engine's requests (`lifecycle.ledger`).
# These need the model: a request to one of them wakes it.
ROUTERS: Final = (
    endpoint, completions, tokens, embeddings, rerank, chat, responses, anthropic, templates,
)  # fmt: skip
# These answer while it sleeps.
WAKEFUL_ROUTERS: Final = (absent, metrics, prompt_graphs, page)

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    number: {
        "description": text,
        "content": {"application/json": {"schema": ERROR_SCHEMA}},
    }
    for number, text in ERROR_STATUSES.items()
}


class Application:
    """The server as an ASGI application."""

    def __init__(self, app: FastAPI, outermost: ASGIApp) -> None:
        self.fastapi = app  # innermost: the routes
        self._outermost = outermost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outermost(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, as it is served."""
        return self.fastapi.openapi()


def create_app(
    state: ServerState, lifecycle: Lifecycle | None = None, *, prefix: str = ""
) -> Application:
    """The server's ASGI application. Without a lifecycle, the state's model is what there is.

    `prefix` stands before every path.
    """
    lifecycle = lifecycle or Lifecycle(state)

    app = FastAPI(
        title="graphseed", version=graphseed.__version__, docs_url=None, redoc_url=None,
        redirect_slashes=False, responses=_ERRORS, strict_content_type=False,
    )  # fmt: skip
    needs_model = [Depends(lifecycle.need)]
    graph_state = partial(prompt_graphs.describe, watch=lifecycle.graphs)
    app.include_router(status.router(state, lifecycle, graph_state))
    short: dict[str, Endpoint] = {}
    for module in ROUTERS:
        routes = _routes_of(module, state, lifecycle)
        short = dict(short_routes(routes.routes)) | short  # of equal paths the first, as FastAPI
        app.include_router(routes, dependencies=needs_model)
    for module in WAKEFUL_ROUTERS:
        app.include_router(_routes_of(module, state, lifecycle))
    for kind in TOLD:
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(Exception, _unforeseen)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    gate = Gate(
        Shortcut(app, short, lifecycle.need), state, lifecycle, frozenset(page.PUBLIC_PATHS)
    )
    return Application(app, Prefixed(gate, prefix) if prefix else gate)


def _routes_of(module: ModuleType, state: ServerState, lifecycle: Lifecycle) -> APIRouter:
    takes_both = len(signature(module.router).parameters) > 1
    routes: APIRouter = module.router(state, lifecycle) if takes_both else module.router(state)
    return routes


async def _told(_: Request, error: Exception) -> Response:
    return reply_to(error)


async def _unforeseen(_: Request, error: Exception) -> Response:
    """The answer to a fault of ours; FastAPI raises the error again, and the gate logs it."""
    return _NoReply() if isinstance(error, ClientDisconnect) else reply_to(Failed(INTERNAL))


class _NoReply(Response):
    """What a client that is gone is answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


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
