"""Connections on real sockets: offers of other protocols, heads without end, and what goes on."""

import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from graphseed.server import connection
from graphseed.server.connection import MAX_HEAD_BYTES
from tests.server.small import listening

BODY = b'{"prompt":"hi"}'
OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
)
HEAD = b"POST /echo?a=1 HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"


async def echo(request: Request) -> Response:
    body = (await request.body()).decode()
    names = sorted({*request.headers})
    return JSONResponse({"path": str(request.url.path), "body": body, "headers": names})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])
    with listening(app, ws="none") as address:
        yield int(address.rpartition(":")[2])


@pytest.fixture
def client(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 10) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield made


def answer(client: socket.socket) -> tuple[int, Any]:
    """Status and body of the next answer; its body as JSON, where it is."""
    with client.makefile("rb") as reader:
        status = int(reader.readline().split()[1])
        length = 0
        while (line := reader.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = reader.read(length)
    return status, json.loads(body) if body.startswith(b"{") else body.decode()


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("cut", [None, 5, -len(BODY), -3, "each byte"])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_whole(
    client: socket.socket, cut: int | str | None
) -> None:
    whole = HEAD % (OFFER, len(BODY)) + BODY
    if cut is None:
        parts = [whole]
    elif isinstance(cut, int):
        parts = [whole[:cut], whole[cut:]]
    else:
        parts = [bytes([byte]) for byte in whole]
    for _ in range(2):  # the connection goes on
        for part in parts:
            client.sendall(part)
            if len(parts) == 2:
                time.sleep(0.05)
        status, told = answer(client)
        assert (status, told["path"], told["body"]) == (200, "/echo", BODY.decode())
        assert told["headers"] == ["content-length", "host"]


def test_a_chunked_body_behind_an_offer_is_whole(client: socket.socket) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % OFFER
    client.sendall(head + b"f\r\n" + BODY + b"\r\n0\r\n\r\n")
    assert answer(client)[1]["body"] == BODY.decode()


def test_what_else_the_connection_header_says_is_kept(client: socket.socket) -> None:
    offer = b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n"
    client.sendall(HEAD % (offer, len(BODY)) + BODY)
    status, told = answer(client)
    assert status == 200 and told["headers"] == ["connection", "content-length", "host"]
    assert is_closed(client)


def test_a_tunnel_is_refused(client: socket.socket) -> None:
    client.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer(client)[0] == 400
    assert is_closed(client)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /echo HTTP/1.1\r\nHost: x\r\nX-A: ", b"a" * 4096),
        (b"GET /", b"a" * 4096),
        (b"GET /echo HTTP/1.1\r\n", b"X-A: a\r\n" * 512),
    ],
)
def test_a_head_without_end_is_refused(client: socket.socket, begin: bytes, more: bytes) -> None:
    client.sendall(begin)
    sent = 0
    with pytest.raises(OSError):
        while sent < 64 * MAX_HEAD_BYTES:
            client.sendall(more)
            sent += len(more)
    assert sent < 64 * MAX_HEAD_BYTES


def test_a_long_head_and_a_longer_body_are_taken_one_behind_the_other(
    client: socket.socket,
) -> None:
    body = b"x" * (8 * MAX_HEAD_BYTES)
    long = HEAD % (b"X-A: %s\r\n" % (b"a" * (MAX_HEAD_BYTES // 2)), len(body)) + body
    for _ in range(3):
        client.sendall(long)
        status, told = answer(client)
        assert status == 200, told
        assert len(told["body"]) == len(body)


def test_requests_in_one_packet_are_answered_in_turn(client: socket.socket) -> None:
    one = HEAD % (b"", len(BODY)) + BODY
    client.sendall(one * 3)
    with client.makefile("rb") as reader:
        text = b""
        while text.count(BODY.replace(b'"', b'\\"')) < 3:
            text += reader.read1(4096)
    assert text.count(b"HTTP/1.1 200") == 3


def test_a_head_that_does_not_come_is_given_up(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    client.sendall(b"GET /echo HTTP/1.1\r\nHo")
    status, told = answer(client)
    assert status == 400 and "did not come within 0.1 s" in told
    assert is_closed(client)


def test_a_head_in_pieces_in_time_is_answered_and_nothing_is_given_up_later(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    for part in (b"GET /echo HTTP/1.1\r\nHo", b"st: x\r\n\r\n"):
        client.sendall(part)
        time.sleep(0.1)
    assert answer(client)[0] == 200
    time.sleep(0.4)
    client.sendall(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer(client)[0] == 200


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_answers_over_tls_come_whole_to_quick_and_slow_readers(loop: str, tmp_path: Path) -> None:
    async def much(request: Request) -> Response:
        return StreamingResponse(b"x" * 65536 for _ in range(64))

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key_file, cert_file = tmp_path / "key.pem", tmp_path / "cert.pem"
    certificate.private_key_pem.write_to_path(str(key_file))
    certificate.cert_chain_pems[0].write_to_path(str(cert_file))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/much", much)])
    more = {"loop": loop, "ssl_keyfile": key_file, "ssl_certfile": cert_file}
    with (
        listening(app, **more) as address,
        httpx.Client(verify=trust, base_url=address.replace("http:", "https:")) as http,
    ):
        assert http.post("/echo", content=BODY).json()["body"] == BODY.decode()
        with http.stream("GET", "/much") as reply:
            time.sleep(0.2)  # the server's buffers are full
            assert sum(map(len, reply.iter_bytes())) == 64 * 65536


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_is_written_goes_out_before_what_else_is_due(loop: str) -> None:
    async def slow(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            time.sleep(1.0)  # the event loop does something else
            yield b"last"

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/slow", slow)])
    with (
        listening(app, loop=loop) as address,
        httpx.stream("GET", f"{address}/slow") as reply,
    ):
        times = [time.monotonic() for _ in reply.iter_raw()]
    assert len(times) == 2 and times[1] - times[0] > 0.25
