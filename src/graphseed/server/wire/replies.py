"""Answers in JSON, and how the OpenAPI document tells of bodies and errors.

Owns `json_reply` and `documented`. Bodies are described and not validated by their schemas: what
llama-server tolerates (unknown fields, null for absent) must pass, and `fields` says what is wrong.
"""

from collections.abc import Iterable
from typing import Any, Final

from starlette.responses import JSONResponse

ERROR_STATUSES: Final = {
    400: "The request cannot be understood or carried out as it is",
    401: "No API key, or a wrong one",
    408: "The body did not come in the time that a request may take",
    413: "The body is too large",
    500: "It went wrong here, or the body is no JSON",
    501: "This model or this server cannot do it",
    503: "Loading, shutting down, or too many requests wait (with Retry-After)",
}
ERROR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
            },
        }
    },
}
_EVENT_SCHEMA: Final[dict[str, Any]] = {
    "description": "one event of the stream, where the body asks for one",
    "type": "object",
    "required": ["data"],
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "description": "JSON; the last of OpenAI's is [DONE]"},
    },
}


class _Json(JSONResponse):
    media_type = "application/json; charset=utf-8"


def json_reply(content: Any, status: int = 200) -> JSONResponse:
    """An answer in JSON."""
    return _Json(content, status)


def documented(
    body: dict[str, Any],
    answer: dict[str, Any],
    summary: str,
    *,
    streams: bool = False,
    statuses: Iterable[int] = (),
) -> dict[str, Any]:
    """What a route's decorator takes to describe a POST: schemas of its body and its answer.

    Every error that any such route can answer is declared; `statuses` are further ones.
    """
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"itemSchema": _EVENT_SCHEMA}
    errors: dict[int | str, dict[str, Any]] = {
        status: {
            "description": ERROR_STATUSES.get(status, "An error"),
            "content": {"application/json": {"schema": ERROR_SCHEMA}},
        }
        for status in (*ERROR_STATUSES, *statuses)
    }
    return {
        "summary": summary,
        "response_model": None,
        "responses": {200: {"description": "The answer", "content": content}, **errors},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}}
        },
    }
