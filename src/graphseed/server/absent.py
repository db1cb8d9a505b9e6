"""Endpoints of llama-server that this server does not have: each says so.

Owns their paths and the reasons. A path that llama-server lacks too is not found, as there.
"""

from typing import Any, Final

from fastapi import APIRouter

from graphseed.server.errors import ApiError, NotPermitted, NotSupported
from graphseed.server.state import ServerState
from graphseed.server.wire.replies import ERROR_SCHEMA

_TEXT: Final = "this server takes text only"
_STREAM: Final = "a stream cannot be taken up again here"
_REASONS: Final = {
    "/audio/transcriptions": (("POST",), _TEXT),
    "/v1/audio/transcriptions": (("POST",), _TEXT),
    "/lora-adapters": (("GET", "POST"), "no adapters are applied; merge them into the weights"),
    "/models/load": (("POST",), "this server has one model"),
    "/models/unload": (("POST",), "this server has one model; see --sleep-idle-seconds"),
    "/v1/stream": (("GET", "DELETE"), _STREAM),
    "/v1/streams/lookup": (("POST",), _STREAM),
}
# What llama-server does only where it was told to; here it cannot be told.
_DISABLED: Final = ("/cors-proxy", "/tools")
_DECLARED: Final[dict[int | str, dict[str, Any]]] = {
    403: {
        "description": "This feature is disabled",
        "content": {"application/json": {"schema": ERROR_SCHEMA}},
    }
}


def router(state: ServerState) -> APIRouter:
    """Routes that answer 501, or 403 where llama-server does."""
    routes = APIRouter(tags=["absent"])

    def refuse(path: str, methods: tuple[str, ...], kind: type[ApiError], why: str) -> None:
        async def refused() -> None:
            raise kind(why)

        for method in methods:
            name = f"{method.lower()}{path.replace('/', '_').replace('-', '_')}"
            routes.add_api_route(
                path, refused, methods=[method], summary="Not here", operation_id=name,
                responses=_DECLARED, response_model=None,
            )  # fmt: skip

    for path, (methods, why) in _REASONS.items():
        refuse(path, methods, NotSupported, f"{path} is not here: {why}")
    for path in _DISABLED:
        refuse(path, ("GET", "POST"), NotPermitted, "this feature is disabled")
    return routes
