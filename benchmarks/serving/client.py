"""Clients that stream completions over HTTP and take the time, each on a connection of its own.

Owns what a client sees of one answer (Answer) and the closed loop of several clients. A request is
one write to the socket, and answers are read by httptools' parser: HTTP libraries for Python add
more of their own to the time to a first token than the server does. Knows no policy.
"""

import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httptools

LOOPBACK: Final = "127.0.0.1"
REPLY_SECONDS: Final = 120.0  # that a server may be silent
DATA: Final = b"data: "
READ_BYTES: Final = 1 << 18


class BadAnswer(Exception):
    """A server answered with an error, or ended a stream early."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, by the client's clock and by the server's own timings."""

    ttft_ms: float  # from the first byte sent to the first token's event read
    total_ms: float  # to the last one's
    token_ids: tuple[int, ...]
    timings: dict[str, Any]  # llama-server's, with prompt_observations and its like

    @property
    def engine_ms(self) -> float:
        """Of the time to the first token, what the engine says was its own: queue and prompt."""
        return float(self.timings["queue_ms"] + self.timings["prompt_ms"])


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of one closed loop saw."""

    answers: tuple[Answer, ...]  # in the order of the requests
    seconds: float  # from the first client's start to the last one's end


def request_of(prompt: str | list[int], num_new: int) -> bytes:
    """A whole /completion request: greedy, so many new tokens, streamed."""
    body = json.dumps(
        {
            "prompt": prompt, "n_predict": num_new, "ignore_eos": True, "stream": True,
            "temperature": 0, "cache_prompt": False,
        }
    ).encode()  # fmt: skip
    head = (
        f"POST /completion HTTP/1.1\r\nHost: {LOOPBACK}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def connected(port: int) -> socket.socket:
    """A connection to a server on this machine."""
    connection = socket.create_connection((LOOPBACK, port), REPLY_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def run_clients(port: int, requests: Sequence[bytes], num_clients: int) -> Load:
    """Let so many clients send the requests in order, each its next one after its last answer.

    Raises the first client's error, once all have ended.
    """
    waiting, answers = iter(enumerate(requests)), dict[int, Answer]()
    errors: list[Exception] = []
    lock = threading.Lock()

    def client() -> None:
        try:
            with connected(port) as connection:
                while True:
                    with lock:
                        job = None if errors else next(waiting, None)
                    if job is None:
                        return
                    answers[job[0]] = ask(connection, job[1])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return Load(tuple(answers[index] for index in range(len(requests))), seconds)


@dataclass(slots=True)
class _Reply:
    """What httptools reads of one response."""

    body: bytearray = field(default_factory=bytearray)
    first_ns: int = 0  # when its first byte was here
    is_whole: bool = False

    def on_body(self, data: bytes) -> None:
        self.first_ns = self.first_ns or time.perf_counter_ns()
        self.body += data

    def on_message_complete(self) -> None:
        self.is_whole = True


def ask(connection: socket.socket, request: bytes) -> Answer:
    """Send one request and read its stream to the end. Raises BadAnswer."""
    reply = _Reply()
    parser = httptools.HttpResponseParser(reply)
    start = time.perf_counter_ns()
    connection.sendall(request)
    while not reply.is_whole:
        data = connection.recv(READ_BYTES)
        if not data:
            raise BadAnswer(f"the connection ended early, after {bytes(reply.body[-200:])!r}")
        parser.feed_data(data)
    end = time.perf_counter_ns()
    if parser.get_status_code() != 200:
        raise BadAnswer(f"status {parser.get_status_code()}: {bytes(reply.body[:500])!r}")
    lines = [line for line in bytes(reply.body).split(b"\n") if line.startswith(DATA)]
    told = [json.loads(line.removeprefix(DATA)) for line in lines]
    if not told or "timings" not in told[-1]:
        raise BadAnswer(f"the stream ended early: {told[-1:]}")
    token_ids = [token_id for event in told[:-1] for token_id in event["tokens"]]
    ttft_ms, total_ms = ((at - start) / 1e6 for at in (reply.first_ns, end))
    return Answer(ttft_ms, total_ms, tuple(token_ids), told[-1]["timings"])
