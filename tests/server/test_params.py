"""What a body asks for, as the engine is told it."""

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from graphseed.engine import BadParameter, SamplingParams
from graphseed.server.errors import ApiError, InvalidRequest, NotSupported
from graphseed.server.settings import ServerSettings
from graphseed.server.wire.params import RANDOM_SEED, SAMPLERS, Asked, parse
from tests.server.small import DEFAULTS, Small, small_server


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server() as server:
        yield server


def asked(server: Small, **body: Any) -> Asked:
    return parse(server.state, body)


def test_an_empty_body_asks_for_the_servers_defaults(server: Small) -> None:
    got = asked(server)
    assert got == Asked(
        params=SamplingParams(
            temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=42, max_tokens=8
        ),
        n_predict=8,
    )


def test_null_is_as_good_as_absent_and_unknown_fields_are_ignored(server: Small) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_k", "stop", "seed", "logit_bias", "max_tokens", "n", "stream",
         "response_format", "logprobs", "id_slot", "lora", "mirostat", "samplers")
    )  # fmt: skip
    assert asked(server, **nulls, frobnicate=[1, {"a": None}]) == asked(server)


def test_each_sampling_field_reaches_the_engine(server: Small) -> None:
    fields = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75,
        "repeat_penalty": 1.25, "repeat_last_n": 9, "presence_penalty": -1.0,
        "frequency_penalty": 2, "seed": 11,
    }  # fmt: skip
    params = asked(server, **fields).params
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("field", "value", "name", "becomes"),
    [
        ("temperature", -1, "temperature", 0.0),
        ("top_k", -1, "top_k", 0),
        ("top_k", 5.0, "top_k", 5),
        ("top_p", 1.5, "top_p", 1.0),
        ("top_p", 0, "top_p", 1e-9),
        ("min_p", 2, "min_p", 1.0),
        ("seed", -2, "seed", 0xFFFF_FFFE),
        ("n_predict", -2, "max_tokens", -1),
        ("n_predict", 0, "max_tokens", 1),
    ],
)
def test_what_llama_server_takes_beyond_a_range_means_the_same_here(
    server: Small, field: str, value: float, name: str, becomes: float
) -> None:
    assert getattr(asked(server, **{field: value}).params, name) == becomes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("temperature", float("nan")),
        ("temperature", 10**400), ("top_k", 1.5), ("top_k", 1 << 70), ("stream", 1),
        ("stream", "true"), ("stop", [1]), ("stop", {"a": 1}), ("seed", "x"), ("n", 0), ("n", 129),
        ("n_predict", -3), ("n_probs", -1), ("id_slot", 2), ("id_slot", -2), ("grammar", 7),
        ("response_format", "json"), ("sse_ping_interval", 0), ("sse_ping_interval", 0.05),
        ("logit_bias", 3),
        ("samplers", [1]), ("stream_options", []), ("response_fields", [1]),
    ],
    ids=lambda value: str(value)[:16],
)  # fmt: skip
def test_a_wrong_value_is_an_error_that_names_field_and_value(
    server: Small, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as error:
        asked(server, **{field: value})
    told = error.value.message
    assert told.startswith(f"{field} is ")
    assert "expected" in told
    assert len(told) < 250


@pytest.mark.parametrize(
    ("field", "value"),
    [("repeat_penalty", 0), ("repeat_last_n", -2), ("presence_penalty", 1e9)],
)
def test_what_the_engine_refuses_is_refused_before_anything_runs(
    server: Small, field: str, value: float
) -> None:
    with pytest.raises(BadParameter, match=field):
        asked(server, **{field: value})


def test_the_first_of_the_names_for_a_limit_counts(server: Small) -> None:
    assert asked(server, max_tokens=3).n_predict == 3
    assert asked(server, max_completion_tokens=4, max_tokens=3).n_predict == 4
    assert asked(server, n_predict=5, max_completion_tokens=4, max_tokens=3).n_predict == 5


def test_seed_minus_one_is_drawn_anew_and_known_afterwards(server: Small) -> None:
    drawn = {asked(server, seed=-1).params.seed for _ in range(8)}
    assert len(drawn) > 1
    assert all(0 <= seed < 1 << 32 for seed in drawn)
    assert len({asked(server, seed=RANDOM_SEED).params.seed for _ in range(8)}) > 1


def test_each_choice_has_a_seed_of_its_own(server: Small) -> None:
    got = asked(server, n=3, seed=(1 << 63) - 1)
    assert [got.params_of(choice).seed for choice in range(3)] == [
        (1 << 63) - 1, 1 << 63, (1 << 63) + 1,
    ]  # fmt: skip


def test_logit_bias_has_four_forms(server: Small) -> None:
    pairs = [[65, 1.5], [66, False], ["ab", -2]]
    want = ((65, 1.5), (66, -inf), (97, -2.0), (98, -2.0))
    assert asked(server, logit_bias=pairs).params.logit_bias == want
    assert asked(server, logit_bias={"65": 1.5, "66": False, "ab": -2}).params.logit_bias == want


@pytest.mark.parametrize(
    "bias", [[[512, 1]], [[-1, 1]], [[1]], [[1, "x"]], [[1, True]], [[None, 1]], {"513": 1}]
)
def test_a_bias_that_cannot_be_is_refused(server: Small, bias: Any) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        asked(server, logit_bias=bias)


def test_ignore_eos_forbids_the_end_of_sequence_unless_a_grammar_needs_it(server: Small) -> None:
    eos = 257
    free = asked(server, ignore_eos=True).params
    assert free.ignore_eos
    assert free.logit_bias == ((eos, -inf),)
    bound = asked(server, ignore_eos=True, grammar='root ::= "a"').params
    assert not bound.ignore_eos
    assert bound.logit_bias == ()


def test_stop_is_a_text_or_a_list_and_empty_texts_do_not_count(server: Small) -> None:
    assert asked(server, stop="x").params.stop == ("x",)
    assert asked(server, stop=["x", "", "yy"]).params.stop == ("x", "yy")
    with pytest.raises(InvalidRequest, match="stop has 257"):
        asked(server, stop=["x"] * 257)


@pytest.mark.parametrize(
    ("body", "has", "num_top", "num_logprobs"),
    [
        ({}, False, 0, 0),
        ({"n_probs": 0}, False, 0, 0),
        ({"n_probs": 4}, True, 4, 4),
        ({"n_probs": 10_000}, True, 10_000, 512),
        ({"logprobs": 3}, True, 3, 3),
        ({"logprobs": 0}, True, 0, 1),
        ({"logprobs": False, "top_logprobs": 5}, False, 0, 0),
        ({"logprobs": True}, True, 0, 1),
        ({"logprobs": True, "top_logprobs": 5}, True, 5, 5),
        ({"n_probs": 2, "post_sampling_probs": True}, True, 2, 40),
        ({"n_probs": 2, "post_sampling_probs": True, "top_k": 0}, True, 2, 512),
        ({"n_probs": 2, "post_sampling_probs": True, "logit_bias": [[1, 1]]}, True, 2, 512),
        ({"n_probs": 2, "post_sampling_probs": True, "temperature": 0}, True, 2, 1),
    ],
)
def test_log_probabilities_are_asked_for_in_three_ways(
    server: Small, body: dict[str, Any], has: bool, num_top: int, num_logprobs: int
) -> None:
    got = asked(server, **body)
    assert (got.has_logprobs, got.num_top, got.params.num_logprobs) == (has, num_top, num_logprobs)


@pytest.mark.parametrize(
    ("body", "gbnf", "schema"),
    [
        ({"grammar": 'root ::= "a"'}, 'root ::= "a"', None),
        ({"grammar": ""}, None, None),
        ({"json_schema": {}}, None, {}),
        ({"json_schema": {"const": 1}}, None, {"const": 1}),
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, None, {}),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, None, {"const": 1}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}},
            None, {"const": 1},
        ),
    ],
)  # fmt: skip
def test_a_constraint_comes_from_whichever_field_has_it(
    server: Small, body: dict[str, Any], gbnf: str | None, schema: Any
) -> None:
    got = asked(server, **body)
    assert (got.gbnf, got.json_schema) == (gbnf, schema)
    assert got.has_grammar == (gbnf is not None or schema is not None)


@pytest.mark.parametrize(
    "body",
    [
        {"grammar": "root ::= [a]", "json_schema": {}},
        {"json_schema": 3},
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "schema": 123}},
    ],
)
def test_a_constraint_that_cannot_be_is_refused(server: Small, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        asked(server, **body)


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [
        ("mirostat", 0, 2), ("dynatemp_range", 0.0, 0.5), ("dry_multiplier", 0, 0.8),
        ("xtc_probability", 0.0, 0.5), ("top_n_sigma", -1.0, 1.5), ("adaptive_target", -1.0, 0.5),
        ("lora", [], [{"id": 0, "scale": 1}]), ("n_indent", 0, 4), ("best_of", 1, 2),
    ],
)  # fmt: skip
def test_samplers_that_are_not_here_are_refused_unless_they_are_off(
    server: Small, field: str, off: Any, on: Any
) -> None:
    assert asked(server, **{field: off}) == asked(server)
    with pytest.raises(NotSupported, match=field) as error:
        asked(server, **{field: on})
    assert error.value.status == 501


def test_values_that_belong_to_a_sampler_that_is_off_are_ignored(server: Small) -> None:
    inert = {
        "dry_base": 2.0, "dry_allowed_length": 3, "dry_sequence_breakers": ["\n"],
        "mirostat_tau": 4.0, "xtc_threshold": 0.3, "dynatemp_exponent": 2.0, "min_keep": 2,
    }  # fmt: skip
    assert asked(server, **inert) == asked(server)


def test_a_sampler_that_is_left_out_is_not_applied(server: Small) -> None:
    got = asked(server, samplers=["top_k", "temperature"], typical_p=0.5, repeat_penalty=1.5)
    assert got.samplers == ("top_k", "temperature")
    assert got.params == SamplingParams(temperature=0.8, top_k=40, seed=42, max_tokens=8)
    assert asked(server, samplers="kypmte").params == asked(server).params
    assert asked(server, samplers=[]).params.temperature == 1.0
    assert asked(server).samplers == SAMPLERS


def test_penalties_cannot_be_had_with_probabilities_after_sampling(server: Small) -> None:
    ask = {"n_probs": 1, "post_sampling_probs": True}
    for more in ({"repeat_penalty": 1.1}, {"grammar": 'root ::= "a"'}):
        with pytest.raises(NotSupported, match="post_sampling_probs"):
            asked(server, **ask, **more)


def test_settings_of_the_server_reach_every_request() -> None:
    settings = ServerSettings(
        num_predict=5, caches_prompts=False, timeout_seconds=7.0, defaults=DEFAULTS
    )
    with small_server(settings) as server:
        got = asked(server)
        assert (got.n_predict, got.caches_prompt, got.seconds) == (5, False, 7.0)
        assert asked(server, cache_prompt=True).caches_prompt


def test_every_error_of_parse_is_told_to_the_client(server: Small) -> None:
    with pytest.raises(ApiError) as error:
        asked(server, temperature="x" * 1000)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert len(error.value.message) < 200
