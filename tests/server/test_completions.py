"""/completion and /v1/completions, as clients of llama-server and of OpenAI see them."""

import concurrent.futures
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import model_of
from tests.server.small import Small, small_server

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


# The whole answer


def test_a_completion_says_everything_about_itself(server: Small) -> None:
    got = server.post("/completion", prompt=PROMPT, n_predict=4)
    timings, settings = got.pop("timings"), got.pop("generation_settings")
    assert len(got.pop("content")) > 0
    assert got == {
        "index": 0, "tokens": [], "id_slot": got["id_slot"], "stop": True, "model": "tiny.gguf",
        "tokens_predicted": 4, "tokens_evaluated": 32, "prompt": PROMPT, "has_new_line": False,
        "truncated": False, "stop_type": "limit", "stopping_word": "", "tokens_cached": 35,
    }  # fmt: skip
    assert got["id_slot"] in (0, 1)
    assert timings["prompt_n"] + timings["cache_n"] == 32
    assert timings["predicted_n"] == 4
    assert all(isinstance(value, int | float) and value >= 0 for value in timings.values())
    assert (settings["n_predict"], settings["seed"], settings["top_k"]) == (4, 42, 40)
    assert {"adaptive_target", "adaptive_decay", "samplers", "mirostat"} <= set(settings)
    assert settings["logit_bias"] == []


def test_tokens_are_returned_where_asked_and_are_the_text(server: Small) -> None:
    got = server.post("/completion", prompt=PROMPT, return_tokens=True)
    assert len(got["tokens"]) == 8
    assert model_of("tiny-llama").decode(got["tokens"]) == got["content"]


def test_both_paths_are_the_same(server: Small) -> None:
    texts = {
        server.post(path, prompt=PROMPT)["content"] for path in ("/completion", "/completions")
    }
    assert len(texts) == 1


def test_the_seed_decides_the_text(server: Small) -> None:
    def text(**more: Any) -> str:
        return str(server.post("/completion", prompt=PROMPT, **more)["content"])

    assert text(seed=5) == text(seed=5)
    assert text(seed=5, cache_prompt=False) == text(seed=5)
    assert len({text(seed=seed, temperature=1.0) for seed in range(4)}) == 4
    assert text(seed=1, temperature=0) == text(seed=2, temperature=0)
    assert text(seed=-1) != text(seed=-1)


def test_a_drawn_seed_is_reported_and_draws_the_same_again(server: Small) -> None:
    got = server.post("/completion", prompt=PROMPT, seed=-1)
    again = server.post("/completion", prompt=PROMPT, seed=got["generation_settings"]["seed"])
    assert again["content"] == got["content"]


def test_fields_are_picked_and_those_within_keep_their_path(server: Small) -> None:
    names = ["content", "generation_settings/n_predict", "prompt", "nothing", "content/x"]
    got = server.post("/completion", prompt=PROMPT, n_predict=3, response_fields=names)
    assert set(got) == {"content", "generation_settings/n_predict", "prompt"}
    assert got["generation_settings/n_predict"] == 3
    assert "timings" in server.post("/completion", prompt=PROMPT, response_fields=[])


def test_a_stop_string_ends_the_answer_and_is_not_shown(server: Small) -> None:
    whole = server.post("/completion", prompt=PROMPT, n_predict=16)["content"]
    word = whole[6:9]
    got = server.post("/completion", prompt=PROMPT, n_predict=16, stop=["never", word])
    assert got["content"] == whole[: whole.index(word)]
    assert (got["stop_type"], got["stopping_word"]) == ("word", word)


def test_an_end_of_sequence_ends_the_answer_unless_it_is_ignored(server: Small) -> None:
    force = {"prompt": PROMPT, "logit_bias": [[257, 1e9]], "n_predict": 4, "return_tokens": True}
    got = server.post("/completion", **force)
    assert (got["stop_type"], got["content"], got["tokens"]) == ("eos", "", [257])
    assert got["tokens_predicted"] == 1
    ignoring = server.post("/completion", **force, ignore_eos=True)
    assert ignoring["stop_type"] == "limit"
    assert 257 not in ignoring["tokens"]
    biases = ignoring["generation_settings"]["logit_bias"]
    assert {"token": 257, "bias": None} in biases


def test_a_biased_token_never_or_always_comes(server: Small) -> None:
    always = server.post("/completion", prompt=PROMPT, logit_bias={"A": 1000}, n_predict=3)
    assert always["content"] == "AAA"
    never = server.post(
        "/completion", prompt=PROMPT, logit_bias=[["A", 1000], ["A", False]], n_predict=3
    )
    assert "A" not in never["content"]


def test_no_tokens_evaluates_the_prompt_alone(server: Small) -> None:
    got = server.post("/completion", prompt=LONG, n_predict=0)
    assert (got["content"], got["tokens_predicted"], got["stop_type"]) == ("", 0, "limit")
    assert got["timings"]["predicted_n"] == 0
    again = server.post("/completion", prompt=LONG, n_predict=1)
    assert again["timings"]["cache_n"] > 0


def test_a_context_that_is_full_ends_the_answer_and_says_so(server: Small) -> None:
    got = server.post("/completion", prompt="a" * 200, n_predict=-1, ignore_eos=True)
    assert got["timings"]["predicted_n"] == 56
    assert (got["truncated"], got["stop_type"]) == (True, "limit")
    assert not server.post("/completion", prompt="a" * 200, n_predict=4)["truncated"]


def test_one_token_has_no_rate(server: Small) -> None:
    timings = server.post("/completion", prompt=PROMPT, n_predict=1)["timings"]
    assert timings["predicted_n"] == 1
    assert (timings["predicted_per_second"], timings["predicted_per_token_ms"]) == (0.0, 0.0)
    assert timings["prompt_ms"] > 0


def test_a_time_limit_ends_the_answer(server: Small) -> None:
    got = server.post(
        "/completion", prompt=PROMPT, n_predict=200, t_max_predict_ms=1, ignore_eos=True
    )
    assert got["stop_type"] == "limit"
    assert 1 <= got["tokens_predicted"] < 200
    assert got["timings"]["predicted_n"] == got["tokens_predicted"]


def test_the_wanted_slot_is_the_one_that_answers(server: Small) -> None:
    assert [server.post("/completion", prompt="a", id_slot=slot)["id_slot"] for slot in (1, 0)] == [
        1, 0,
    ]  # fmt: skip


def test_a_cached_prompt_is_not_evaluated_again_unless_that_is_declined(server: Small) -> None:
    prompt = "a prompt of its own " * 4
    first, second, third = (
        server.post("/completion", prompt=prompt, n_predict=1, cache_prompt=cache)["timings"]
        for cache in (True, True, False)
    )
    assert (first["cache_n"], third["cache_n"]) == (0, 0)
    assert second["cache_n"] > 0
    assert second["cache_n"] + second["prompt_n"] == first["prompt_n"]


def test_a_schema_or_a_grammar_binds_every_answer(server: Small) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    got = server.post(
        "/completion", prompt=["a", "b"], n_cmpl=2, n_predict=64, json_schema=schema,
        temperature=1.0, ignore_eos=True,
    )  # fmt: skip
    assert {one["stop_type"] for one in got} == {"eos"}
    assert all(json.loads(one["content"])["n"] in (1, 22) for one in got)
    bound = server.post("/completion", prompt="a", n_predict=64, grammar='root ::= "x" [0-9]{3}')
    assert re.fullmatch("x[0-9]{3}", bound["content"])
    assert bound["generation_settings"]["grammar"] == 'root ::= "x" [0-9]{3}'
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}
    text = server.post("/v1/completions", prompt="a", max_tokens=64, response_format=form)
    assert text["choices"][0]["text"] == '"yes"'
    for broken in ({"grammar": "root ::= ("}, {"json_schema": {"type": "hiccup"}}):
        server.refused("/completion", 400, prompt="a", **broken)


# Many prompts, many answers


def test_prompts_of_a_list_are_answered_in_their_order(server: Small) -> None:
    prompts: list[Any] = [PROMPT, list(b"abc"), {"prompt_string": "x"}, [97, "bc"], PROMPT]
    got = server.post("/completion", prompt=prompts, temperature=0, cache_prompt=False)
    alone = [
        server.post("/completion", prompt=prompt, temperature=0, cache_prompt=False)
        for prompt in prompts
    ]
    assert [one["content"] for one in got] == [one["content"] for one in alone]
    assert [one["index"] for one in got] == [0, 1, 2, 3, 4]
    assert got[1]["content"] == got[3]["content"]


def test_a_list_of_one_prompt_is_one_answer(server: Small) -> None:
    assert isinstance(server.post("/completion", prompt=[PROMPT]), dict)


def test_each_prompt_has_as_many_answers_as_asked_for(server: Small) -> None:
    got = server.post("/completion", prompt=["a", "b"], n_cmpl=3, temperature=1.0)
    assert len(got) == 6
    assert [one["prompt"] for one in got] == list("aaabbb")
    assert [one["generation_settings"]["seed"] for one in got] == [42, 43, 44] * 2
    assert len({one["content"] for one in got[:3]}) == 3


def test_one_prompt_that_cannot_run_ends_all_before_any_runs(server: Small) -> None:
    error = server.refused("/completion", 400, prompt=["a", "a" * 256])
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (256, 256)


def test_more_answers_than_may_ever_wait_are_refused() -> None:
    with small_server(max_waiting=2) as server:
        assert "at most 4" in server.refused("/completion", 400, prompt=["a"] * 5)["message"]
        assert len(server.post("/completion", prompt=["a"] * 4)) == 4


def test_a_full_queue_is_unavailable_with_a_time_to_retry() -> None:
    with small_server(max_waiting=0, num_parallel=1, context_len=2048) as server:
        body = {"prompt": "a", "n_predict": -1, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(server.client.post, "/completion", json={**body, "n_predict": 400})
            while server.core.scheduler.is_idle:
                time.sleep(0.001)
            for more in ({}, {"stream": True}):
                reply = server.client.post("/completion", json={**body, **more})
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert first.result().status_code == 200


# OpenAI's form


def test_a_text_completion_has_openais_shape(server: Small) -> None:
    native = server.post("/completion", prompt=PROMPT, n_predict=4)
    got = server.post("/v1/completions", prompt=PROMPT, max_tokens=4, model="whatever")
    assert got["choices"] == [
        {"text": native["content"], "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert got["object"] == "text_completion"
    assert got["system_fingerprint"].startswith("b")
    assert "cmpl" in got["id"]
    assert got["usage"]["prompt_tokens"] == 32
    assert got["usage"]["completion_tokens"] == 4
    assert got["usage"]["total_tokens"] == 36
    cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == got["timings"]["cache_n"] > 0


def test_choices_of_all_prompts_stand_side_by_side(server: Small) -> None:
    got = server.post("/v1/completions", prompt=["ab", "c"], n=2, max_tokens=3)
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    assert got["usage"]["prompt_tokens"] == 3
    assert got["usage"]["completion_tokens"] == 12


def test_a_text_stream_ends_with_a_reason_then_usage_then_done(server: Small) -> None:
    ask = {"prompt": PROMPT, "max_tokens": 4, "n": 2}
    events = server.events("/v1/completions", **ask, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    totals = events.pop()
    assert totals["choices"] == []
    assert totals["usage"]["completion_tokens"] == 8
    whole = server.post("/v1/completions", **ask)
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own] == [None] * 4 + ["length"]
    assert len({event["id"] for event in [*events, totals]}) == 1
    assert server.events("/v1/completions", prompt="a", max_tokens=1)[-2]["usage"]


def test_verbose_adds_llama_servers_object(server: Small) -> None:
    got = server.post("/v1/completions", prompt=PROMPT, max_tokens=2, verbose=True)
    assert got["__verbose"]["content"] == got["choices"][0]["text"]
    assert got["__verbose"]["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/completion", 400, {}),
        ("/completion", 400, {"prompt": 3}),
        ("/completion", 400, {"prompt": [1, 512]}),
        ("/completion", 400, {"prompt": [[1], [-1]]}),
        ("/completion", 501, {"prompt": {"prompt_string": "a", "multimodal_data": "aaaa"}}),
        ("/completion", 501, {"prompt": "a", "mirostat": 1}),
        ("/v1/completions", 501, {"prompt": "a", "echo": True}),
        ("/v1/completions", 501, {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", 400, {"prompt": "a", "echo": "yes"}),
        ("/infill", 501, {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_what_cannot_be_answered_is_refused(
    server: Small, path: str, status: int, body: dict[str, Any]
) -> None:
    kinds = {400: "invalid_request_error", 501: "not_supported_error"}
    assert server.refused(path, status, **body)["type"] == kinds[status]


def test_an_empty_prompt_is_a_beginning_of_sequence(server: Small) -> None:
    got = server.post("/completion", prompt="")
    assert (got["tokens_evaluated"], got["prompt"]) == (1, "<|bos|>")
