"""The benchmark of the server, as a program: what it measures, and what it refuses."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISABLE = "GGML_CUDA_DISABLE_GRAPHS"


@pytest.fixture
def over_http(monkeypatch):
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("over_http")


def test_answers_over_http_are_those_of_the_stream_under_every_policy(over_http, tmp_path):
    path = tmp_path / "x.jsonl"
    arguments = (
        f"-m random:tiny-llama --device cpu --prompts 20,64 --clients 1,2 --requests 4 -ub 32 "
        f"-np 2 --new-tokens 3 --json {path}"
    )
    assert over_http.main(arguments.split()) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["policy"], row["clients"], row["prompt_tokens"]) for row in rows] == [
        (policy, clients, length)
        for policy in ("off", "seed", "resident")
        for clients in (1, 2)
        for length in (20, 64)
    ]
    for row in rows:
        # Each is a median of its own: of the parts, none can be above the whole, but their sum can.
        assert row["ttft_ms"] > max(row["queue_ms"], row["prompt_ms"])
        assert row["queue_ms"] > 0 and row["prompt_ms"] > 0
        assert row["outside_engine_ms"] > 0 and row["all_prompt_tokens_per_second"] > 0
        assert ("added_ms" in row) is (row["clients"] == 1)
        if row["clients"] == 1:
            assert row["equal_answers"] and row["equal_to_off"]
    hits = {(row["policy"], row["clients"], row["prompt_tokens"]): row["hit_rate"] for row in rows}
    assert all(hits["off", *load] == 0 for load in ((1, 20), (1, 64), (2, 20), (2, 64)))
    # Each answer of one chunk releases what its own prompt seeded; of two chunks the second hits.
    assert hits["seed", 1, 20] == 0 and hits["seed", 1, 64] == 0.5
    assert hits["resident", 1, 20] == hits["resident", 1, 64] == 1


def test_pairs_are_compared_one_by_one_and_an_answer_that_differs_is_found(over_http):
    own = [over_http.Streamed(ttft_ms, 1.5, (1, 2)) for ttft_ms in (2.0, 20.0, 200.0)]
    timings = {"queue_ms": 0.5, "prompt_ms": 1.5}

    def over(ttft_ms, token_ids=(1, 2)):
        return over_http.Answer(ttft_ms, 300.0, token_ids, timings)

    found = over_http.beside(own, [over(2.5), over(20.75), over(210.0)])
    assert (found["added_ms"], found["added_outside_engine_ms"]) == (0.75, 0.25)
    assert found["stream_ttft_ms"] == 20.0 and found["equal_answers"]
    assert not over_http.beside(own[:1], [over(2.5, (1, 3))])["equal_answers"]


def test_what_is_outside_the_engine_is_of_each_request_and_then_a_median(over_http):
    def answer(ttft_ms, queue_ms, prompt_ms):
        timings = {
            "queue_ms": queue_ms, "prompt_ms": prompt_ms, "prompt_observations": 2,
            "prompt_replayed": 1, "prompt_per_second": 10.0, "predicted_per_second": 5.0,
        }  # fmt: skip
        return over_http.Answer(ttft_ms, 2 * ttft_ms, (1, 2), timings)

    # One request waits long and another computes long: their medians add up to more than any took.
    answers = (answer(10.5, 9.0, 1.0), answer(10.5, 1.0, 9.0), answer(18.5, 9.0, 9.0))
    case = over_http.Case(prompt_len=30, num_clients=2, num_requests=3, has_ids=True)
    row = over_http.row_of("seed", case, over_http.Load(answers, seconds=0.5))
    assert (row["ttft_ms"], row["queue_ms"], row["prompt_ms"]) == (10.5, 9.0, 9.0)
    assert row["outside_engine_ms"] == 0.5 and row["hit_rate"] == 0.5
    assert row["all_prompt_tokens_per_second"] == 3 * 30 / 0.5


def test_a_server_that_does_not_come_up_says_its_last_words(over_http, tmp_path):
    flags = ["-m", "random:no-such-preset"]
    with (
        pytest.raises(over_http.ServerFailed, match="random:no-such-preset"),
        over_http.serving(flags, tmp_path / "log", start_seconds=60),
    ):
        pytest.fail("it came up")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "7"], "--requests is 7; expected at least 8"),
        (["--new-tokens", "1"], "--new-tokens is 1; expected at least 2"),
        (["-np", "0"], "-np is 0; expected at least 1"),
        (["--json", "nowhere/x.jsonl"], "--json is 'nowhere'; expected a folder that exists"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_loaded(over_http, capsys, arguments, said):
    assert over_http.main(["--device", "cpu", *arguments]) == 2
    assert said in capsys.readouterr().err
