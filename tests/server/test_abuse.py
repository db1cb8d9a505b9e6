"""Clients that mean harm, or know no better: they get an error, and keep nothing."""

import contextlib
import hmac
import json
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from graphseed.server.settings import ServerSettings
from tests.cli.test_serve import running
from tests.server.conftest import MakeServer, Server
from tests.server.small import DEFAULTS, Small, listening, small_server

ASK = {"prompt": [5] * 8, "n_predict": 4, "temperature": 0}


@contextlib.contextmanager
def on_socket(**sizes) -> Iterator[tuple[Small, str]]:
    settings = ServerSettings(
        num_predict=8, defaults=DEFAULTS, timeout_seconds=sizes.pop("timeout_seconds", 60.0)
    )
    with small_server(settings, **sizes) as server, listening(server.app) as address:
        yield server, address


def connected(address: str, receive_bytes: int | None = None) -> socket.socket:
    """A connection on which a test writes what no client would."""
    host, port = address.removeprefix("http://").split(":")
    plain = socket.socket()
    if receive_bytes is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plain.settimeout(20)
    plain.connect((host, int(port)))
    return plain


def head(*lines: str, path: str = "/completion") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1")


def everything(plain: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    said = b""
    while piece := plain.recv(1 << 16):
        said += piece
    return said


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n{}\r\n0\r\n\r\n",  # no length
        b"-1\r\n{}\r\n0\r\n\r\n",
        b"5\r\n{}\r\n0\r\n\r\n",  # a wrong one
        b"f" * 40 + b"\r\n{}\r\n",
    ],
)
def test_a_malformed_chunk_is_answered_400_and_nothing_else_is_harmed(body, caplog):
    with on_socket() as (server, address):
        with connected(address) as plain:
            plain.sendall(head("Transfer-Encoding: chunked") + body)
            assert everything(plain).startswith(b"HTTP/1.1 400 ")
        assert httpx.post(f"{address}/completion", json=ASK).status_code == 200
        server.wait_until_idle()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_is_answered_408_and_the_connection_closed(framing):
    with on_socket(timeout_seconds=0.5) as (_, address), connected(address) as plain:
        plain.sendall(head(framing))
        said = everything(plain)
    first, _, rest = said.partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 408 ") and b"connection: close" in rest.lower()
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == 408 and error["message"].endswith("did not come within 0.5 s")


def test_a_client_that_never_reads_holds_no_slot_and_in_the_end_nothing(caplog):
    caplog.set_level("INFO", logger="graphseed.server")
    # 200 events of 30 KB each are more than what sockets and uvicorn hold.
    body = {
        **ASK, "n_predict": 200, "stream": True, "n_probs": 400, "ignore_eos": True,
    }  # fmt: skip
    raw = json.dumps(body).encode()
    with (
        on_socket(timeout_seconds=4.0, num_parallel=1) as (server, address),
        connected(address, receive_bytes=4096) as plain,
    ):
        plain.sendall(head(f"Content-Length: {len(raw)}") + raw)
        until = time.monotonic() + 20
        while not server.ledger.last_of_slot(0):
            assert time.monotonic() < until
            time.sleep(0.01)
        # The one slot is free again when its answer is made, read or not.
        answered = httpx.post(f"{address}/completion", json=ASK, timeout=20)
        assert answered.status_code == 200
        assert server.ledger.num_open == 1  # nobody has read it
        while server.ledger.num_open:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert "nobody reads its answer" in caplog.text
    assert "Traceback" not in caplog.text


def test_lists_without_end_do_not_hold_up_others():
    bodies = (
        ("/completion", {"prompt": [""] * 300_000}),
        ("/completion", {"prompt": [1] + [""] * 300_000}),
        ("/completion", {"prompt": "a", "logit_bias": [["a", 1.0]] * 100_000}),
        ("/v1/embeddings", {"input": [""] * 300_000}),
    )
    with small_server(ServerSettings(embeds=True, defaults=DEFAULTS)) as server:
        for path, body in bodies:
            begun = time.monotonic()
            refused = server.client.post(path, json=body)
            assert refused.status_code == 400, path
            # Looked at one by one these took 5 to 100 s, in which no other stream went on.
            assert time.monotonic() - begun < 3.0, path


def test_nothing_that_a_client_sends_becomes_a_header():
    lines = (
        "Content-Length: 2", "Connection: close", "X-Request-Id: a%0d%0aX-Evil: 1",
        "Origin: http://a%0d%0aX-Evil:1",
    )  # fmt: skip
    with on_socket() as (_, address):
        with connected(address) as plain:
            plain.sendall(head(*lines) + b"{}")
            said = everything(plain).partition(b"\r\n\r\n")[0].lower()
        assert b"x-request-id: a%0d" not in said and b"\r\nx-evil" not in said
        for forged in (b"X-Request-Id: a\r\n X-Evil: 1", b"Origin: a\rX-Evil: 1"):
            with connected(address) as plain:
                start = head("Content-Length: 2", "Connection: close").removesuffix(b"\r\n")
                plain.sendall(start + forged + b"\r\n\r\n{}")
                assert b"\r\nx-evil" not in everything(plain).lower()


def test_every_path_but_health_and_the_page_needs_the_key_and_compares_it_in_constant_time(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
):
    server: Server = make_server(api_keys=("first", "second"), has_metrics=True)
    num_compared = 0
    compare = hmac.compare_digest

    def counted(one, other):
        nonlocal num_compared
        num_compared += 1
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    paths = [
        (method, path)
        for path, found in server.app.openapi()["paths"].items()
        for method in found
        if path not in ("/health", "/v1/health")
    ]
    assert ("post", "/prompt-graphs/release") in paths and ("post", "/completion") in paths
    for method, path in [*paths, ("get", "/openapi.json"), ("get", "/nothing")]:
        for headers in ({}, {"Authorization": "Bearer firs"}, {"X-Api-Key": "secondx"}):
            num_compared = 0
            refused = server.http.request(method, path, headers=headers)
            assert refused.status_code == 401, (method, path)
            assert num_compared == 2  # every key, whichever is nearly right
    for path in ("/health/", "/health/../completion", "/page/../completion", "/%2e%2e/health"):
        assert server.http.post(path, json={}).status_code == 401


def test_running_and_unread_streams_end_with_the_process(tmp_path):
    body = json.dumps({**ASK, "n_predict": 4000, "stream": True, "ignore_eos": True}).encode()
    argv = ("-c", "16384", "-np", "4", "--drain-seconds", "1")
    with running(tmp_path, *argv, OMP_NUM_THREADS="1") as server, contextlib.ExitStack() as stack:
        address = server.address()
        server.wait_for("the model is loaded: ready")
        streams = [stack.enter_context(connected(address)) for _ in range(6)]
        for plain in streams:
            plain.sendall(head(f"Content-Length: {len(body)}") + body)
        for plain in streams[:4]:
            assert plain.recv(4096).startswith(b"HTTP/1.1 200 ")
        server.process.send_signal(signal.SIGTERM)
        said = [everything(plain) for plain in streams[:5]]  # the last one's nobody reads
        assert server.process.wait(20) == 0
    for text in said[:4]:
        assert b'"error":{"code":503' in text and text.endswith(b"0\r\n\r\n")
    assert said[4].startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 "))  # it waited for a slot
    assert "Traceback" not in server.log
