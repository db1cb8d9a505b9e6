"""Streams of completions, and clients that leave: each answer is its own, and frees its slot."""

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from graphseed.engine import Status
from graphseed.server.settings import ServerSettings
from tests.server.small import DEFAULTS, Small, events_of, leave_when, listening, small_server

PROMPT = "I believe the meaning of life is"
LONG = "the quick brown fox jumps over the lazy dog " * 4  # 176 tokens: 6 chunks of 32


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server() as server:
        yield server


@pytest.fixture(autouse=True)
def everything_is_free_afterwards(server: Small) -> Iterator[None]:
    yield
    server.wait_until_idle()


# Streams


def test_a_stream_has_a_chunk_for_each_token_and_its_text_is_the_whole(server: Small) -> None:
    whole = server.post("/completion", prompt=PROMPT, return_tokens=True)
    events = server.events("/completion", prompt=PROMPT)
    *chunks, last = events
    assert len(chunks) == 8
    assert "".join(chunk["content"] for chunk in events) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert [chunk["tokens_predicted"] for chunk in chunks] == list(range(1, 9))
    for chunk in chunks:
        assert set(chunk) == {
            "index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated",
        }  # fmt: skip
        assert not chunk["stop"]
    ignored = {"timings", "id_slot", "generation_settings"}
    assert {name: last[name] for name in last if name not in ignored} == {
        **{name: whole[name] for name in whole if name not in ignored}, "content": "", "tokens": [],
    }  # fmt: skip
    assert last["generation_settings"]["stream"]


def test_held_back_text_is_told_with_the_token_that_decides_it(server: Small) -> None:
    ask = {"prompt": PROMPT, "logit_bias": {"A": 1000}, "n_predict": 4, "stop": ["AAB", "AAAAA"]}
    chunks = server.events("/completion", **ask)
    assert [chunk["tokens"] for chunk in chunks] == [[65], [65], [65], [65], []]
    assert "".join(chunk["content"] for chunk in chunks) == "AAAA"
    assert chunks[0]["content"] == ""


def test_timings_come_with_each_chunk_where_asked(server: Small) -> None:
    chunks = server.events("/completion", prompt=PROMPT, timings_per_token=True, n_predict=4)
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_progress_begins_with_what_is_cached_and_ends_with_the_whole(server: Small) -> None:
    ask = {"prompt": "!" + LONG, "return_progress": True, "timings_per_token": True, "n_predict": 2}
    for is_cached in (False, True):
        chunks = server.events("/completion", **ask)
        reports = [chunk for chunk in chunks if "prompt_progress" in chunk]
        assert chunks[: len(reports)] == reports
        progress = [report["prompt_progress"] for report in reports]
        first = progress[0]
        assert first["processed"] == first["cache"]
        assert (first["cache"] > 0) == is_cached
        assert {one["total"] for one in progress} == {177}
        assert {one["cache"] for one in progress} == {first["cache"]}
        assert progress[-1]["processed"] == 177
        done = [one["processed"] for one in progress]
        assert done == sorted(set(done))
        assert len(reports) == (2 if is_cached else 7)
        timings = reports[0]["timings"]
        assert [timings[n] for n in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")] == [
            0, 0, 0, 0,
        ]  # fmt: skip
        ms = [report["timings"]["prompt_ms"] for report in reports]
        assert ms == sorted(ms)
        assert [one["time_ms"] for one in progress] == pytest.approx(ms, abs=5)  # read one by one
        assert ms[-1] > 0
        assert all(value >= 0 for report in reports for value in report["timings"].values())


def test_progress_is_not_told_unless_asked_for_and_streamed(server: Small) -> None:
    assert not any("prompt_progress" in chunk for chunk in server.events("/completion", prompt="a"))
    assert "prompt_progress" not in server.post("/completion", prompt="a", return_progress=True)


def test_the_answers_of_several_prompts_are_told_apart_in_one_stream(server: Small) -> None:
    prompts = [PROMPT, "abc", "x"]
    events = server.events("/completion", prompt=prompts, temperature=0, cache_prompt=False)
    whole = server.post("/completion", prompt=prompts, temperature=0, cache_prompt=False)
    for index, want in enumerate(whole):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in own) == want["content"]
        assert [event["stop"] for event in own] == [False] * 8 + [True]


def test_an_error_before_any_token_of_a_stream_is_a_plain_one(server: Small) -> None:
    error = server.refused("/completion", 400, prompt="a" * 300, stream=True)
    assert "exceeds the available context size" in error["message"]
    assert server.refused("/completion", 400, prompt="a", stream=True, id_slot=9)


def test_an_error_after_a_token_of_a_stream_is_an_event() -> None:
    settings = ServerSettings(timeout_seconds=0.3, defaults=DEFAULTS)
    with small_server(settings, context_len=2048) as server:
        events = server.events("/completion", prompt="a", n_predict=-1, ignore_eos=True)
        assert events[0]["tokens"]
        assert events[-1]["error"]["code"] == 503
        assert "did not finish" in events[-1]["error"]["message"]


# Over a socket


def test_requests_at_once_have_the_answers_they_have_alone() -> None:
    prompts = [f"prompt number {n} " * (1 + n % 3) for n in range(12)]
    with small_server(num_parallel=4) as server, listening(server.app) as address:
        ask = {"n_predict": 12, "seed": 7, "temperature": 1.0, "cache_prompt": False}

        def run(prompt: str) -> str:
            body = {"prompt": prompt, **ask, "stream": len(prompt) % 2 == 0}
            reply = httpx.post(f"{address}/completion", json=body, timeout=30)
            assert reply.status_code == 200
            if not body["stream"]:
                return str(reply.json()["content"])
            return "".join(event["content"] for event in events_of(reply.text))

        alone = [run(prompt) for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            assert list(pool.map(run, prompts)) == alone
        server.wait_until_idle()


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"prompt": ["a", "b", "c"]}])
def test_a_client_that_leaves_frees_its_slots_within_two_seconds(body: dict[str, Any]) -> None:
    with small_server(context_len=2048) as server, listening(server.app) as address:
        free = server.core.num_free_blocks
        ask = {"prompt": "a", "n_predict": -1, "ignore_eos": True, "cache_prompt": False, **body}
        leave_when(f"{address}/completion", ask, lambda: server.core.scheduler.num_running > 0)
        server.wait_until_idle(2.0)
        tasks = [server.ledger.last_of_slot(slot) for slot in (0, 1)]
        ended = {task.request.status for task in tasks if task is not None}
        assert ended == {Status.FAILED}  # none was run to its end
        until = time.monotonic() + 2
        while server.core.num_free_blocks < free and time.monotonic() < until:
            time.sleep(0.01)
        assert server.core.num_free_blocks == free
        assert httpx.post(f"{address}/completion", json={"prompt": "a", "n_predict": 1}).is_success
