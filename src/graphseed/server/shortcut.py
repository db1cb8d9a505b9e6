"""The shortest way to an endpoint: one look into a table in place of the framework's search.

Owns Shortcut, an ASGI layer around the application, and which routes go its way: POSTs to a fixed
path whose endpoint takes the request and nothing else. FastAPI looks at one route after the other
and works out what an endpoint depends on at each request, which takes longer than all the rest that
is done before a prompt is handed in. Does not know any endpoint, and no other route goes its way.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from inspect import iscoroutinefunction, signature
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from graphseed.server.told import TOLD, reply_to

Endpoint = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """Answers what is in its table, and leaves the rest to the application.

    `endpoints` are POSTs by path; `awake` is awaited before each.
    """

    def __init__(
        self, app: ASGIApp, endpoints: dict[str, Endpoint], awake: Callable[[], Awaitable[None]]
    ) -> None:
        self._app, self._endpoints, self._awake = app, endpoints, awake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._awake()
            response = await endpoint(Request(scope, receive, send))
        except TOLD as error:
            response = reply_to(error)
        await response(scope, receive, send)


def short_routes(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, Any]]:
    """Path and endpoint of those routes that may go the short way."""
    for route in routes:
        if (
            isinstance(route, APIRoute)
            and route.methods == {"POST"}
            and not route.param_convertors
            and not route.dependencies
            and iscoroutinefunction(route.endpoint)
            and list(signature(route.endpoint).parameters) == ["request"]
        ):
            yield route.path, route.endpoint
