"""Grammars and JSON schemas on models that write noise: what comes out follows them."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphseed.capture.selector import Selection
from graphseed.drivers import open_driver
from graphseed.engine import (
    Engine,
    EngineConfig,
    EngineCore,
    FinishReason,
    Grammar,
    SamplingParams,
)
from graphseed.models import load_model
from graphseed.models.model import Model
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.generation import GenerateOptions, Generation
from graphseed.server.grammar.compile import Constraint, compile_format, compile_grammar
from graphseed.server.grammar.gbnf import to_ebnf
from graphseed.server.grammar.schemas import checked_schema
from graphseed.server.settings import ServerSettings
from graphseed.server.state import Served, ServerState

JSON_GBNF = r"""# JSON in a few rules, with an empty alternative and no limit on depth
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    driver = open_driver("cpu")
    model: Model = load_model(
        "random:tiny-llama", device=driver.device, dtype="fp32", bf16_is_fast=False
    )
    config = EngineConfig(context_len=512, num_parallel=4)
    with Engine(EngineCore(model, driver, config)) as engine:
        yield ServerState(
            ServerSettings(), Selection(), "test", "random:tiny-llama", Served(engine, model)
        )


def params(seed: int = 1, max_tokens: int = 200) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens)


def answer(state: ServerState, params: SamplingParams, **grammar: Any) -> tuple[str, FinishReason]:
    constraint = compile_grammar(state, **grammar)
    generation = Generation(state.ready.engine, [1, 2, 3], GenerateOptions(params, constraint))
    pieces = asyncio.run(generation.read())
    return "".join(piece.text for piece in pieces), generation.finish_reason


def allowed(grammar: Grammar | None) -> set[int]:
    """Tokens that may come next."""
    assert grammar is not None
    mask = grammar.allowed()
    assert mask is not None, "every token may"
    words = mask.tolist()
    return {32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


@pytest.mark.parametrize(
    ("gbnf", "pattern"),
    [
        ('root ::= "a"{5,5}', "a{5}"),
        ('root ::= "a" [a-z]{1,6}', "a[a-z]{1,6}"),
        ('root ::= 9-lives "!"\n9-lives ::= "cat" | ', "(cat)?!"),
        ('root ::= ("x" | | "y") . "z"', "[xy]?.z"),
        ('root ::= "\\x41" [^\\x00-\\x60\\x7f-\\U0010ffff]{2} # "not | this"', "A[a-~]{2}"),
    ],
)  # fmt: skip
def test_an_answer_follows_its_gbnf_grammar(state: ServerState, gbnf: str, pattern: str) -> None:
    for seed in range(4):
        text, reason = answer(state, params(seed), gbnf=gbnf)
        assert re.fullmatch(pattern, text, re.DOTALL), (seed, text)
        assert reason is FinishReason.END_OF_SEQUENCE


def test_llama_cpps_style_of_json_grammar_gives_json(state: ServerState) -> None:
    num_ended = 0
    for seed in range(8):
        text, reason = answer(state, params(seed), gbnf=JSON_GBNF)
        assert text.startswith("{")
        if reason is FinishReason.END_OF_SEQUENCE:
            num_ended += 1
            assert isinstance(json.loads(text, strict=False), dict)
    assert num_ended, "not one of the answers ended: the limit is too low to see anything"


SCHEMAS: list[tuple[dict[str, Any] | bool, Callable[[Any], bool]]] = [
    ({"const": "42"}, lambda value: value == "42"),
    ({"enum": ["red", "green", 7, None]}, lambda value: value in ["red", "green", 7, None]),
    ({"type": "string", "maxLength": 5}, lambda value: isinstance(value, str) and len(value) <= 5),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        lambda value: 2 <= len(value) <= 3 and all(isinstance(one, bool) for one in value),
    ),
    (
        {"items": [{"type": "boolean"}, {"type": "null"}]},
        lambda value: len(value) == 2 and isinstance(value[0], bool) and value[1] is None,
    ),
    (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 4},
                "mood": {"enum": ["good", "bad"]},
                "age": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["name", "mood", "age"],
        },
        lambda value: (
            list(value) == ["name", "mood", "age"]
            and len(value["name"]) <= 4
            and value["mood"] in ("good", "bad")
            and 1 <= value["age"] <= 99
        ),
    ),
    (
        {
            "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}},
            "anyOf": [{"$ref": "#/$defs/leaf"}, {"const": "none"}],
        },
        lambda value: value == "none" or 0 <= value <= 9,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "is_valid"), SCHEMAS)
def test_an_answer_parses_and_is_valid_for_its_schema(
    state: ServerState, schema: Any, is_valid: Callable[[Any], bool]
) -> None:
    for seed in range(4):
        text, reason = answer(state, params(seed), json_schema=schema)
        assert reason is FinishReason.END_OF_SEQUENCE, text
        assert is_valid(json.loads(text)), (seed, text)


def test_an_empty_schema_takes_any_json(state: ServerState) -> None:
    text, reason = answer(state, params(3, max_tokens=300), json_schema={"type": "object"})
    assert text.startswith("{")
    if reason is FinishReason.END_OF_SEQUENCE:
        json.loads(text)


def test_constrained_and_free_requests_run_together(state: ServerState) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}

    async def read(seed: int, grammar: Any) -> tuple[list[int], str]:
        engine = state.ready.engine
        options = GenerateOptions(params(seed, max_tokens=60), grammar)
        generation = Generation(engine, [seed, 9, 4], options)
        await generation.read()
        return generation.request.output_ids, generation.request.text

    async def together() -> list[tuple[list[int], str]]:
        grammars = [
            compile_grammar(state, json_schema=schema), None,
            compile_grammar(state, gbnf='root ::= "a" [b-y]{8} "z"'), None,
        ]  # fmt: skip
        return await asyncio.gather(*(read(seed, grammar) for seed, grammar in enumerate(grammars)))

    listed, free, lettered, also_free = asyncio.run(together())
    assert all(isinstance(one, bool) for one in json.loads(listed[1]))
    assert re.fullmatch("a[b-y]{8}z", lettered[1])
    for seed, seen in ((1, free), (3, also_free)):
        assert seen == asyncio.run(read(seed, None)), (
            "a free answer changed beside constrained ones"
        )


def test_a_complete_grammar_allows_every_end_of_sequence_and_nothing_else(
    state: ServerState,
) -> None:
    model = state.ready.model
    many = ServerState(
        state.settings, state.selection, "test", "test",
        Served(state.ready.engine, _with_eos_ids(model, frozenset({31, 63, 257}))),
    )  # fmt: skip
    grammar = compile_grammar(many, gbnf='root ::= "ab"?')
    assert grammar is not None
    assert allowed(grammar) == {97, 31, 63, 257}  # "a", or nothing at all
    grammar.accept(97)
    assert allowed(grammar) == {98}
    grammar.accept(98)
    assert allowed(grammar) == {31, 63, 257}
    grammar.accept(63)
    assert allowed(grammar) == {31, 63, 257}  # still, where the end is ignored
    grammar.accept(63)


def test_special_tokens_are_no_text(state: ServerState) -> None:
    bos, eos = 256, 257
    grammar = compile_grammar(state, gbnf='root ::= "<|bos|>" [^a]')
    for byte in b"<|bos|>":
        assert allowed(grammar) == {byte}, "the token of that name has no text"
        assert grammar is not None
        grammar.accept(byte)
    words = allowed(grammar)
    assert {bos, eos} & words == set() and ord("b") in words and ord("a") not in words


def _with_eos_ids(model: Model, eos_ids: frozenset[int]) -> Model:
    return dataclasses.replace(model, eos_ids=eos_ids)


def test_a_model_without_an_end_of_sequence_has_no_grammars(state: ServerState) -> None:
    served = Served(state.ready.engine, _with_eos_ids(state.ready.model, frozenset()))
    endless = ServerState(state.settings, state.selection, "test", "test", served)
    with pytest.raises(NotSupported, match="no end of sequence"):
        compile_grammar(endless, gbnf='root ::= "a"')


def test_a_token_that_was_not_allowed_is_an_error(state: ServerState) -> None:
    grammar = compile_grammar(state, gbnf='root ::= "a"')
    assert isinstance(grammar, Constraint)
    with pytest.raises(InvalidRequest, match="does not allow token 98"):
        grammar.accept(98)


@pytest.mark.parametrize(
    ("gbnf", "message"),
    [
        ("root ::= this is (not valid GBNF", "failed to parse grammar: EBNF parser error at line"),
        ('a ::= "x"', 'failed to parse grammar: .*root rule with name "root"'),
        ('root ::= "a" = "b"', "'= \"b\"' in line 1, column 14 is not GBNF"),
        ("root ::= x\nx ::= 'b'", "line 2, column 7 is not GBNF"),
        ('root ::= "never closed', "is not GBNF"),
        (5, "grammar is 5; expected a text"),
        ("#" * 300_000, "has 300000 characters"),
    ],
)
def test_a_bad_grammar_says_what_is_wrong(state: ServerState, gbnf: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        compile_grammar(state, gbnf=gbnf)


def test_tokens_in_a_grammar_are_not_supported() -> None:
    with pytest.raises(NotSupported, match="<think>"):
        to_ebnf('root ::= <think> "a"')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": 123}, "failed to parse json_schema: Type should be a string"),
        ({"type": "hiccup"}, 'Unsupported type "hiccup"'),
        ({"$ref": "#/nope"}, "nope"),
        (123, "the JSON schema is 123; expected an object"),
        ({"enum": ["x" * 300_000]}, "characters; expected 262144 or less"),
    ],
)
def test_a_bad_schema_says_what_is_wrong(state: ServerState, schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        compile_grammar(state, json_schema=schema)


def test_a_schema_may_be_nested_only_so_deep() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested deeper than 100 levels"):
        checked_schema(schema)
    while schema:  # taken apart by hand: dropping it in one go would recurse in the interpreter
        schema = schema["items"]


def test_items_lists_are_rewritten_at_any_depth() -> None:
    schema = {"properties": {"pair": {"items": [{"type": "integer"}, {"items": [True]}]}}}
    pair = checked_schema(schema)["properties"]["pair"]  # type: ignore[index]
    assert pair["minItems"] == 2 and pair["items"] is False and pair["type"] == "array"
    assert pair["prefixItems"][1]["prefixItems"] == [True]
    assert "prefixItems" not in schema["properties"]["pair"], "the client's object was changed"


def test_grammar_and_schema_exclude_each_other(state: ServerState) -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        compile_grammar(state, gbnf='root ::= "a"', json_schema={})
    assert compile_grammar(state) is None
    assert compile_grammar(state, gbnf="") is None


def test_a_format_mixes_text_and_json(state: ServerState) -> None:
    call = {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"const": 1}},
        "end": "</call>",
    }
    grammar = compile_format(state, {"type": "sequence", "elements": [call]})
    options = GenerateOptions(params(), grammar)
    generation = Generation(state.ready.engine, [5], options)
    asyncio.run(generation.read())
    assert generation.request.text == "<call>1</call>"
    with pytest.raises(InvalidRequest, match="failed to parse tools"):
        compile_format(state, {"type": "nonsense"})
