"""Log-probabilities and probabilities of tokens, in the shapes that clients know."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from graphseed.engine import SamplingParams
from graphseed.server.wire.probs import filtered
from tests.server.small import Small, small_server

PROMPT = "I believe the meaning of life is"


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server() as server:
        yield server


@pytest.fixture(autouse=True)
def everything_is_free_afterwards(server: Small) -> Iterator[None]:
    yield
    server.wait_until_idle()


def test_likely_tokens_are_reported_with_their_log_probabilities(server: Small) -> None:
    got = server.post(
        "/completion", prompt=PROMPT, n_probs=10, n_predict=5, temperature=0, return_tokens=True
    )
    entries = got["completion_probabilities"]
    assert [entry["id"] for entry in entries] == got["tokens"]
    for entry in entries:
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        top = entry["top_logprobs"]
        assert len(top) == 10
        assert top[0] == {name: entry[name] for name in ("id", "token", "bytes", "logprob")}
        values = [one["logprob"] for one in top]
        assert values == sorted(values, reverse=True)
        assert values[0] <= 0
    text = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert text.decode(errors="replace") == got["content"]


def test_log_probabilities_of_all_tokens_are_a_distribution(server: Small) -> None:
    got = server.post("/completion", prompt=PROMPT, n_probs=512, n_predict=1)
    (entry,) = got["completion_probabilities"]
    assert math.fsum(math.exp(one["logprob"]) for one in entry["top_logprobs"]) == pytest.approx(1)


def test_each_chunk_of_a_stream_has_the_probabilities_of_its_token(server: Small) -> None:
    ask = {"prompt": PROMPT, "n_probs": 3, "n_predict": 4}
    *chunks, last = server.events("/completion", **ask)
    whole = server.post("/completion", **ask)["completion_probabilities"]
    assert [chunk["completion_probabilities"] for chunk in chunks] == [[entry] for entry in whole]
    assert "completion_probabilities" not in last


def test_probabilities_after_sampling_are_those_of_what_the_filters_keep(server: Small) -> None:
    ask = {"prompt": PROMPT, "n_probs": 10, "n_predict": 5, "post_sampling_probs": True}
    for more in ({}, {"top_k": 5}, {"temperature": 0}, {"min_p": 0.9, "top_k": 0}):
        got = server.post("/completion", **ask, **more)
        for entry in got["completion_probabilities"]:
            assert set(entry) == {"id", "token", "bytes", "prob", "top_probs"}
            top = {one["id"]: one["prob"] for one in entry["top_probs"]}
            assert 0 < entry["prob"] <= 1
            assert all(0 < prob <= 1 for prob in top.values())
            assert top.get(entry["id"], entry["prob"]) == entry["prob"]
            if len(top) < 10:
                assert entry["id"] in top
                assert sum(top.values()) == pytest.approx(1.0)


def test_probabilities_after_sampling_see_biases_and_penalties(server: Small) -> None:
    ask = {
        "prompt": PROMPT, "n_predict": 2, "top_k": 2, "top_p": 1.0, "min_p": 0.0,
        "temperature": 1.0, "logit_bias": [["A", 1000], ["B", 1000.5]], "presence_penalty": 0.75,
        "repeat_last_n": -1,
    }  # fmt: skip
    got = server.post("/completion", **ask, n_probs=2, post_sampling_probs=True)
    raw = server.post("/completion", **ask, n_probs=512)
    seen: set[str] = set()
    for entry, likely in zip(
        got["completion_probabilities"], raw["completion_probabilities"], strict=True
    ):
        logs = {one["token"]: one["logprob"] for one in likely["top_logprobs"]}
        wanted = {
            token: math.exp(logs[token] + bias - 0.75 * (token in seen))
            for token, bias in (("A", 0.0), ("B", 0.5))
        }
        shares = {token: odds / sum(wanted.values()) for token, odds in wanted.items()}
        assert {one["token"]: one["prob"] for one in entry["top_probs"]} == pytest.approx(shares)
        assert entry["prob"] == pytest.approx(shares[entry["token"]])
        seen.add(entry["token"])


def test_the_filters_on_the_host_keep_what_the_engine_may_draw() -> None:
    values = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    logs = [math.log(value) for value in values]

    def kept(**params: Any) -> list[float]:
        return [float(x) for x in filtered(np.array(logs), SamplingParams(**params))]

    def near(*want: float) -> Any:
        return pytest.approx(list(want))

    assert kept(temperature=1.0) == near(*values)
    assert kept(temperature=1.0, top_k=2) == near(2 / 3, 1 / 3, 0, 0, 0)
    assert kept(temperature=1.0, top_p=0.7) == near(2 / 3, 1 / 3, 0, 0, 0)
    assert kept(temperature=1.0, min_p=0.5) == near(2 / 3, 1 / 3, 0, 0, 0)
    assert kept(temperature=0.5, top_k=2) == near(0.8, 0.2, 0, 0, 0)
    # The entropy is 1.875 bits: a probability of 1/4 surprises by 2 bits, and is the most usual.
    assert kept(temperature=1.0, typical_p=0.2) == near(0, 1, 0, 0, 0)


def test_log_probabilities_have_openais_lists_and_llama_servers(server: Small) -> None:
    got = server.post("/v1/completions", prompt=PROMPT, max_tokens=3, logprobs=2)
    lists = got["choices"][0]["logprobs"]
    assert [len(one) for one in lists["top_logprobs"]] == [2, 2, 2]
    assert [entry["logprob"] for entry in lists["content"]] == lists["token_logprobs"]
    assert lists["text_offset"][0] == 0
    events = server.events("/v1/completions", prompt=PROMPT, max_tokens=3, logprobs=2)
    streamed = [event["choices"][0]["logprobs"] for event in events[:3]]
    assert [one["tokens"][0] for one in streamed] == lists["tokens"]
    assert [one["text_offset"][0] for one in streamed] == lists["text_offset"]


def test_parts_of_characters_are_told_apart_by_their_bytes(server: Small) -> None:
    got = server.post(
        "/v1/completions", prompt="a", max_tokens=2, logprobs=2, temperature=0,
        logit_bias=[[195, 100], [169, 99]], presence_penalty=50,
    )  # fmt: skip
    assert got["choices"][0]["text"] == "é"
    assert got["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
