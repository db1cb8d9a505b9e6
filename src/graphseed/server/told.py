"""What becomes of an exception: the reply that tells a client of it.

Owns TOLD, the kinds that a client learns of, and `reply_to`. Other exceptions are faults of ours,
and the gate's.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from graphseed.capture.errors import GraphseedError
from graphseed.server.errors import ApiError, Failed, InvalidRequest, NotFound, of_exception
from graphseed.server.wire.replies import json_reply

TOLD: Final = (
    ApiError, GraphseedError, HTTPException, RequestValidationError, json.JSONDecodeError,
)  # fmt: skip

logger = logging.getLogger("graphseed.server")


def reply_to(error: Exception) -> JSONResponse:
    """The reply to one of TOLD: an error object."""
    match error:
        case HTTPException():
            return _of_framework(error)
        case RequestValidationError():
            return _of_validation(error)
        case json.JSONDecodeError():  # as llama-server
            return json_reply(Failed(f"the body is no JSON: {error}").body, 500)
    told = of_exception(error)
    if isinstance(told, Failed) and told is not error:
        logger.error("a request failed in the engine", exc_info=error)
    return _reply(told.body, told.status, told.headers)


def _of_framework(error: HTTPException) -> JSONResponse:
    told: ApiError = InvalidRequest(str(error.detail))
    if error.status_code == 404:
        told = NotFound("File Not Found")
    body = told.body
    body["error"]["code"] = error.status_code
    return _reply(body, error.status_code, error.headers or {})


def _of_validation(error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return json_reply(Failed("the body is no JSON").body, 500)
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    given = f" is {first['input']!r:.80}" if "input" in first and first["type"] != "missing" else ""
    return json_reply(InvalidRequest(f"{where}{given}: {first['msg']}").body, 400)


def _reply(body: dict[str, Any], status: int, headers: Mapping[str, str]) -> JSONResponse:
    reply = json_reply(body, status)
    reply.headers.update(headers)
    return reply
