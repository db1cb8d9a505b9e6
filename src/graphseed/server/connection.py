"""HTTP/1.1 on one connection: uvicorn's protocol on httptools, made safe.

Owns Connection. What httptools leaves open is closed here: the lines before a body have no limit of
size or of time, and a request that offers another protocol (`Upgrade`, as Java's client does with
each request) loses its body. An offer may be ignored (RFC 9110, 7.8), and is. Names of headers are
written as llama-server writes them, since there are clients that look at their case.
"""

import asyncio
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any, Final

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 1 << 16  # request line and headers of a request
HEAD_SECONDS: Final = 30.0  # from its first bytes to its last header
FLOW: Final = "graphseed.flow"  # the ASGI extension in which an application finds its Flow

# uvicorn looks for these, in small letters.
_FRAMING: Final = frozenset({b"connection", b"content-length", b"transfer-encoding"})
_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})


class Flow:
    """What an application can know of its request: whether it would have to wait."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle  # uvicorn's of one request

    @property
    def has_whole_body(self) -> bool:
        """Whether the request is here to its end: to receive it takes no time."""
        return not self._cycle.more_body

    @property
    def is_free(self) -> bool:
        """Whether what is sent goes out: the client reads, so that sending takes no time."""
        return not self._cycle.flow.write_paused


class Connection(HttpToolsProtocol):
    """One client's connection; uvicorn makes it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._num_heads = 0  # whole ones so far
        self._is_in_head = True
        self._num_bytes = 0  # of a head that is not whole
        self._deadline: asyncio.TimerHandle | None = None  # of that head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What is written goes out at once, not when all else that is due was done: uvloop keeps
        # back what is less than this. TLS counts otherwise, and would wait for ever.
        if transport.get_extra_info("sslcontext") is None:
            transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        num_heads, was_in_head = self._num_heads, self._is_in_head
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        if not (was_in_head and self._is_in_head) or self._num_heads > num_heads:
            return
        self._num_bytes += len(data)
        if self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")
        elif self._deadline is None:
            self._deadline = self.loop.call_later(
                HEAD_SECONDS, self._refuse, f"The headers did not come within {HEAD_SECONDS:g} s."
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_head()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # `_feed` comes back to it
            return
        self._end_of_head()
        self._num_heads += 1
        self._is_in_head = False
        super().on_headers_complete()
        # Of this request, whose application begins when all that is here was parsed.
        cycle: Any = self.cycle
        cycle.send = _with_case(cycle.send)
        cycle.scope["extensions"] = {FLOW: Flow(cycle)}

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head = True
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        """Parse. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self._feed(head + rest)

    def _head_without_offer(self) -> bytes:
        """The head that was read, as if no other protocol had been offered."""
        if not any(name in _OFFERS for name, _ in self.headers):  # CONNECT is no such offer
            raise httptools.HttpParserError("a tunnel was asked for")
        lines = [b"%s %s HTTP/%s" % (
            self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        )]  # fmt: skip
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() not in _OFFERS)
            if name not in _OFFERS and (value or name != b"connection"):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _end_of_head(self) -> None:
        self._num_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, why: str) -> None:
        self.logger.warning("%s", why)
        self.send_400_response(why)


class _Written(bytes):
    """A header's name as it goes out: uvicorn would make it small."""

    def lower(self) -> bytes:
        return self


def _with_case(send: Send) -> Send:
    """The way out for the messages of one answer, on which the names of headers get their case."""

    def send_with_case(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = [(_cased(name), value) for name, value in message.get("headers", ())]
            message = {**message, "headers": headers}
        return send(message)

    return send_with_case


@lru_cache(maxsize=256)  # of the few that answers have
def _cased(name: bytes) -> bytes:
    if name in _FRAMING:
        return name
    return _Written(b"-".join(part.capitalize() for part in name.split(b"-")))
