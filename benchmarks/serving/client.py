"""Clients that stream completions over HTTP and take the time, each on a connection of its own.

Owns what a client sees of one answer (Answer) and the closed loop of several clients. The standard
library's client is used, because it adds least of its own to what is timed. Knows no policy.
"""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"
REPLY_SECONDS: Final = 120.0  # that a server may be silent
DATA: Final = b"data: "


class BadAnswer(Exception):
    """A server answered with an error, or ended a stream early."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, by the client's clock and by the server's own timings."""

    ttft_ms: float  # from the first byte sent to the first token's event read
    token_ids: tuple[int, ...]
    timings: dict[str, Any]  # llama-server's, with prompt_observations and its like

    @property
    def engine_ms(self) -> float:
        """Of the time to the first token, what the engine says was its own: queue and prompt."""
        return float(self.timings["queue_ms"] + self.timings["prompt_ms"])


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of one closed loop saw."""

    answers: tuple[Answer, ...]  # in the order of the bodies
    seconds: float  # from the first client's start to the last one's end


def body_of(prompt_ids: Sequence[int], num_new: int) -> bytes:
    """A /completion body: greedy, so many new tokens, streamed."""
    return json.dumps(
        {
            "prompt": list(prompt_ids), "n_predict": num_new, "ignore_eos": True, "stream": True,
            "temperature": 0, "cache_prompt": False,
        }
    ).encode()  # fmt: skip


def run_clients(port: int, bodies: Sequence[bytes], num_clients: int) -> Load:
    """Let so many clients send the bodies in order, each its next one after its last answer.

    Raises the first client's error, once all have ended.
    """
    waiting, answers = iter(enumerate(bodies)), dict[int, Answer]()
    errors: list[Exception] = []
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(LOOPBACK, port, timeout=REPLY_SECONDS)
        try:
            connection.connect()
            while True:
                with lock:
                    job = None if errors else next(waiting, None)
                if job is None:
                    return
                answers[job[0]] = ask(connection, job[1])
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return Load(tuple(answers[index] for index in range(len(bodies))), seconds)


def ask(connection: http.client.HTTPConnection, body: bytes) -> Answer:
    """Send one body and read its stream to the end. Raises BadAnswer."""
    start = time.perf_counter_ns()
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise BadAnswer(f"status {response.status}: {response.read(500)!r}")
    first_ns, events = 0, []
    while line := response.readline():
        if line.startswith(DATA):
            first_ns = first_ns or time.perf_counter_ns()
            events.append(line)
    told = [json.loads(event.removeprefix(DATA)) for event in events]
    if not told or "timings" not in told[-1]:
        raise BadAnswer(f"the stream ended early: {told[-1:]}")
    token_ids = [token_id for event in told[:-1] for token_id in event["tokens"]]
    return Answer((first_ns - start) / 1e6, tuple(token_ids), told[-1]["timings"])
