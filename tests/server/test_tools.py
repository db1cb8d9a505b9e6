"""Tools: what is offered, and the forms that force a call in each style of writing one."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from graphseed.engine import FinishReason, SamplingParams
from graphseed.server.conversation.messages import Call
from graphseed.server.conversation.reading import AnswerReader, Kind
from graphseed.server.conversation.tools import (
    CallStyle,
    Choice,
    Tools,
    described,
    forced_form,
    tools_of,
    written_call,
)
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.generation import GenerateOptions, Generation
from graphseed.server.grammar.compile import compile_format
from tests.server.small import Small, small_server
from tests.server.test_grammar import allowed

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"hot": {"type": "boolean"}, "sky": {"enum": ["blue", "grey"]}},
            "required": ["hot", "sky"],
        },
    },
}
TIME = {"type": "function", "function": {"name": 'the "time"'}}


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server(context_len=512) as small:
        yield small


def tools(*offered: dict[str, Any], choice: Any = "required", several: bool = False) -> Tools:
    body = {"tools": [*offered], "tool_choice": choice, "parallel_tool_calls": several}
    return tools_of(body, uses_jinja=True)


def answer(
    server: Small, form: dict[str, Any], seed: int, max_tokens: int = 300
) -> tuple[str, Any]:
    params = SamplingParams(temperature=2.0, seed=seed, max_tokens=max_tokens)
    grammar = compile_format(server.state, form)
    generation = Generation(server.state.ready.engine, [5], GenerateOptions(params, grammar))
    asyncio.run(generation.read())
    return generation.request.text, generation.finish_reason


def calls_in(text: str, offered: Tools, *, is_thinking: bool = False) -> list[Call]:
    """The calls that a text is; it must be nothing else, but for thoughts."""
    reader = AnswerReader(offered.names, reads_thoughts=True, is_thinking=is_thinking)
    parts = reader.push(text) + reader.finish()
    assert {part.kind for part in parts} <= {Kind.CALL, Kind.THOUGHT}, text
    return [part.call for part in parts if part.call is not None]


@pytest.mark.parametrize("style", CallStyle)
def test_a_forced_call_is_one_in_every_style(server: Small, style: CallStyle) -> None:
    offered = tools(WEATHER)
    for seed in range(3):
        text, reason = answer(server, forced_form(offered, style, is_thinking=False), seed)
        assert reason is FinishReason.END_OF_SEQUENCE
        (call,) = calls_in(text, offered)
        assert call.name == "weather" and isinstance(call.arguments["hot"], bool)
        # Between tags, blanks around a value are not told apart from it.
        assert call.arguments["sky"].strip() in ("blue", "grey")


@pytest.mark.parametrize("style", [CallStyle.TAGGED, CallStyle.PLAIN, CallStyle.LIST])
def test_a_tools_name_may_be_any_text(server: Small, style: CallStyle) -> None:
    offered = tools(TIME)
    text, _ = answer(server, forced_form(offered, style, is_thinking=False), 1)
    (call,) = calls_in(text, offered)
    assert call.name == 'the "time"' and call.arguments == {}


@pytest.mark.parametrize("style", [CallStyle.TAGGED, CallStyle.TAGGED_XML, CallStyle.LIST])
def test_several_calls_are_made_only_where_they_may_be(server: Small, style: CallStyle) -> None:
    one, several = tools(WEATHER), tools(WEATHER, several=True)
    counts = set()
    for seed in range(8):
        text, reason = answer(server, forced_form(several, style, is_thinking=False), seed)
        if reason is FinishReason.END_OF_SEQUENCE:
            counts.add(len(calls_in(text, several)))
        text, _ = answer(server, forced_form(one, style, is_thinking=False), seed)
        assert len(calls_in(text, one)) == 1
    assert max(counts) > 1


def test_a_thought_that_is_open_comes_before_the_call(server: Small) -> None:
    offered = tools(TIME)
    form = forced_form(offered, CallStyle.TAGGED, is_thinking=True)
    grammar = compile_format(server.state, form)
    for byte in b"hm, {so} <tool_call> be it</think>\n\n":
        mask = grammar.allowed()
        assert mask is None or byte in allowed(grammar)
        grammar.accept(byte)
    assert allowed(grammar) == {ord("<")}


def test_what_is_offered_is_checked_and_filled_in() -> None:
    assert tools_of({}, uses_jinja=False) == tools_of({"tools": []}, uses_jinja=True) == Tools()
    found = tools_of({"tools": [TIME]}, uses_jinja=True)
    assert found.choice is Choice.AUTO and not found.must_call and not found.allows_several
    assert found.offered[0]["function"] == {
        "name": 'the "time"', "description": "", "parameters": {"type": "object", "properties": {}},
    }  # fmt: skip
    assert list(found.offered[0]["function"])[0] == "name"
    assert tools(TIME, choice="none").names == frozenset()
    by_name = {"type": "function", "function": {"name": "weather"}}
    assert tools(TIME, WEATHER, choice=by_name).names == {"weather"}
    assert tools(TIME, WEATHER, choice={"type": "function", "name": "weather"}).must_call


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"tools": "weather"}, InvalidRequest, "tools is"),
        ({"tools": ["weather"]}, InvalidRequest, "tools.0. is"),
        ({"tools": [{"type": "function", "function": {}}]}, InvalidRequest, "with a name"),
        ({"tools": [{"type": "retrieval"}]}, NotSupported, "retrieval"),
        (
            {"tools": [{"function": {"name": "a", "parameters": 3}}]},
            InvalidRequest, "schema is 3",
        ),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, InvalidRequest, "tool_choice"),
        ({"tools": [TIME], "parallel_tool_calls": 3}, InvalidRequest, "parallel_tool_calls"),
        ({"tool_choice": "required"}, InvalidRequest, "without tools"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_said(
    body: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        tools_of(body, uses_jinja=True)


def test_a_call_in_words_is_read_back() -> None:
    offered = tools(WEATHER)
    call = Call("weather", {"sky": "grau <&>"})
    (found,) = calls_in(written_call(call), offered)
    assert (found.name, found.arguments) == (call.name, call.arguments)
    assert json.dumps(offered.offered[0]) in described(offered)
    assert json.loads(found.arguments_json) == call.arguments
