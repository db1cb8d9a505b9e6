"""What every HTTP request goes through: its id, its log line, its limits, and who may ask.

Owns Gate, the ASGI layer around everything else. Answers by itself what no endpoint must see:
preflights, a server that is loading or ending, missing keys, bodies that are too large, and faults
of ours, of which the client learns nothing and the log everything.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import ClassVar, Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphseed.server.auth import PUBLIC_PATHS, ApiKeys, Cors
from graphseed.server.connection import FLOW, Flow
from graphseed.server.errors import ApiError, Failed, NotAuthenticated, Unavailable
from graphseed.server.ledger import CURRENT, HttpRecord
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.state import ServerState

JSON_TYPE: Final = "application/json; charset=utf-8"
INTERNAL: Final = "internal error; the server's log has the details"
# What monitors ask for again and again.
POLLED_PATHS: Final = PUBLIC_PATHS | {
    "/metrics", "/models", "/prompt-graphs", "/props", "/slots", "/v1/models",
}  # fmt: skip

_ID: Final = re.compile(rb"[\w.-]{1,64}")
_MAX_PATH_SHOWN: Final = 200

logger = logging.getLogger("graphseed.server.http")


class BodyTooLarge(ApiError):
    """The request's body is larger than it may be."""

    status: ClassVar[int] = 413
    kind: ClassVar[str] = "invalid_request_error"


class BodyTooSlow(ApiError):
    """The request's body did not come in the time that a request may take."""

    status: ClassVar[int] = 408
    kind: ClassVar[str] = "invalid_request_error"


class Prefixed:
    """Takes a prefix off every path; what does not begin with it is not found."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, prefix = scope["path"], self._prefix
            is_inside = path == prefix or path.startswith(f"{prefix}/")
            rest = path.removeprefix(prefix) or "/"
            scope = {**scope, "path": rest if is_inside else "/:outside", "root_path": ""}
        await self._app(scope, receive, send)


class Gate:
    """Stands around the application; one for each server."""

    def __init__(
        self, app: ASGIApp, state: ServerState, lifecycle: Lifecycle, page_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._state = state
        self._lifecycle = lifecycle
        self._keys = ApiKeys(state.settings.api_keys)
        self._cors = Cors(state.settings.cors_origins)
        self._page_paths = page_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = HttpRecord(scope["method"], scope["path"])
        given = headers.get(b"x-request-id", b"")
        if _ID.fullmatch(given):
            record.number = given.decode()
        settings = self._state.settings
        exchange = _Exchange(
            record, receive, send, settings.max_body_bytes, settings.timeout_seconds,
            (scope.get("extensions") or {}).get(FLOW),
        )  # fmt: skip
        exchange.add(self._cors.headers(_text(headers.get(b"origin"))))
        token = CURRENT.set(record)
        try:
            await self._answer(scope, headers, exchange)
        except ClientDisconnect:
            logger.debug("request id=%s: the client went away", record.number)
        except Exception:
            logger.exception("request id=%s failed", record.number)
            if not exchange.has_started:
                await exchange.answer(Failed(INTERNAL))
        finally:
            if record.needs_model:
                self._lifecycle.no_longer()
            self._log(record)
            CURRENT.reset(token)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], exchange: "_Exchange"
    ) -> None:
        if scope["method"] == "OPTIONS":
            origin = _text(headers.get(b"origin"))
            await exchange.answer_empty(self._cors.preflight_headers(origin))
            return
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await exchange.answer(refusal)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and len(length) < 20 and int(length) > exchange.max_body_bytes:
            await exchange.answer(exchange.too_large())
            return
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except (BodyTooLarge, BodyTooSlow) as error:
            if not exchange.has_started:
                await exchange.answer(error)

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        state, is_page = self._state, path in self._page_paths
        if state.is_closing:
            return Unavailable(state.refusal)
        if is_page:
            return None
        if state.served is None and not state.is_sleeping:
            return Unavailable("Loading model")
        if path not in PUBLIC_PATHS and not self._keys.admits(headers):
            return NotAuthenticated("Invalid API Key")
        return None

    def _log(self, record: HttpRecord) -> None:
        level = logging.DEBUG if record.path in POLLED_PATHS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        ms = (time.perf_counter_ns() - record.started_ns) / 1e6
        logger.log(
            level, "request id=%s method=%s path=%s status=%s ms=%.2f%s", record.number,
            record.method, quote(record.path[:_MAX_PATH_SHOWN]), record.status or "none", ms,
            _of_tasks(record),
        )  # fmt: skip
        if self._state.settings.logs_prompts and self._state.served is not None:
            for task in record.tasks:
                text = self._state.served.model.decode(task.request.prompt_ids)
                logger.log(level, "request id=%s prompt=%s", record.number, json.dumps(text))


class _Exchange:
    """One request's body as it comes in, and its answer as it goes out.

    A client that sends or reads nothing for `seconds` is given up, so that it holds nothing: its
    stream is closed, and the server may sleep or end.
    """

    def __init__(
        self,
        record: HttpRecord,
        receive: Receive,
        send: Send,
        max_bytes: int,
        seconds: float,
        flow: Flow | None,
    ) -> None:
        self.max_body_bytes = max_bytes
        self.has_started = False
        self._seconds = seconds
        self._flow = flow  # where the connection is ours: a timer is needed for real waits alone
        self._is_read = False  # the whole body
        self._is_given_up = False
        self._record, self._receive, self._send = record, receive, send
        self._num_bytes = 0
        self._refusal: ApiError | None = None  # of the body
        self._headers: list[tuple[bytes, bytes]] = [(b"x-request-id", record.number.encode())]

    def add(self, headers: Mapping[str, str]) -> None:
        """Headers that the answer has, whoever makes it."""
        self._headers += _raw(headers)

    def too_large(self) -> BodyTooLarge:
        """What is wrong with a body above the limit."""
        limit = self.max_body_bytes
        return BodyTooLarge(f"the request's body is larger than {limit} bytes, the most it may be")

    async def receive(self) -> Message:
        """The application's `receive`. Raises BodyTooLarge, BodyTooSlow."""
        # Once the body is there, what may still come is the client's end.
        if self._is_read or (self._flow is not None and self._flow.has_whole_body):
            message = await self._receive()
        else:
            message = await self._receive_in_time()
        if message["type"] == "http.request":
            self._is_read = not message.get("more_body", False)
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self.max_body_bytes:
                self._refusal = self.too_large()
                raise self._refusal
        return message

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._receive()
        except TimeoutError:
            told = f"the request's body did not come within {self._seconds:g} s"
            self._refusal = BodyTooSlow(told)
            raise self._refusal from None

    async def send(self, message: Message) -> None:
        """The application's `send`."""
        if self._refusal is None:
            await self._put(message)
        elif not self.has_started:  # whatever the application made of it
            await self.answer(self._refusal)

    async def answer(self, error: ApiError) -> None:
        """Answer with an error object."""
        headers = {"Content-Type": JSON_TYPE, **error.headers}
        if isinstance(error, NotAuthenticated):
            headers["WWW-Authenticate"] = "Bearer"
        if isinstance(error, BodyTooLarge | BodyTooSlow):
            headers["Connection"] = "close"  # the rest of the body is not read
        await self._whole(error.status, headers, json.dumps(error.body).encode())

    async def answer_empty(self, headers: Mapping[str, str]) -> None:
        """Answer 200 without a body."""
        self._headers = self._headers[:1]  # the caller's headers have the origin's
        await self._whole(200, {"Content-Type": "text/html", **headers}, b"")

    async def _whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        raw = [*_raw(headers), (b"content-length", str(len(body)).encode())]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})
        await self._put({"type": "http.response.body", "body": body})

    async def _put(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self._record.status = message["status"]
            headers = [*message.get("headers", ()), *self._headers]
            message = {**message, "headers": [_with_charset(*header) for header in headers]}
        if self._is_given_up:
            raise ClientDisconnect
        if self._flow is not None and self._flow.is_free:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            self._is_given_up = True
            logger.info("request id=%s: nobody reads its answer", self._record.number)
            raise ClientDisconnect from None


def _of_tasks(record: HttpRecord) -> str:
    """What the engine did for one HTTP request, for its log line."""
    if not record.tasks:
        return ""
    requests = [task.request for task in record.tasks]
    slots = [str(request.slot) for request in requests if request.slot is not None]
    queued = [
        (request.timings.started_ns - request.timings.submitted_ns) / 1e6
        for request in requests
        if request.timings.started_ns
    ]
    return (
        f" prompt_tokens={sum(len(request.prompt_ids) for request in requests)}"
        f" cached_tokens={sum(request.num_cached for request in requests)}"
        f" new_tokens={sum(len(request.output_ids) for request in requests)}"
        f" slot={','.join(slots) or 'none'} queue_ms={max(queued, default=0.0):.2f}"
    )


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _with_charset(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header as llama-server has it: its JSON says that it is UTF-8."""
    is_json = name == b"content-type" and value == b"application/json"
    return name, JSON_TYPE.encode() if is_json else value
