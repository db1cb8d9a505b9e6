"""What a model wrote, taken apart: the same however the text is cut into pieces."""

import json
import random
from typing import Any

import pytest

from graphseed.server.conversation.reading import AnswerReader, Kind, Part

TOOLS = frozenset({"weather", "list files"})
WEATHER = '{"name": "weather", "arguments": {"city": "Łódź"}}'


def read(
    pieces: list[str],
    names: frozenset[str] = TOOLS,
    *,
    reads_thoughts: bool = True,
    is_thinking: bool = False,
) -> list[Part]:
    reader = AnswerReader(names, reads_thoughts=reads_thoughts, is_thinking=is_thinking)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish()


def told(parts: list[Part]) -> list[tuple[Kind, Any]]:
    """Parts with texts of one kind joined, and calls by name and arguments."""
    joined: list[tuple[Kind, Any]] = []
    for part in parts:
        if part.call is not None:
            joined.append((Kind.CALL, (part.call.name, part.call.arguments)))
        elif joined and joined[-1][0] is part.kind:
            joined[-1] = (part.kind, joined[-1][1] + part.text)
        else:
            joined.append((part.kind, part.text))
    return joined


CASES: list[tuple[str, list[tuple[Kind, Any]]]] = [
    ("", []),
    ("  \n", [(Kind.TEXT, "  \n")]),
    (" hello  there \n", [(Kind.TEXT, " hello  there \n")]),
    ("<thin air", [(Kind.TEXT, "<thin air")]),
    ("<", [(Kind.TEXT, "<")]),
    ("a <think> b", [(Kind.TEXT, "a <think> b")]),
    ("<think>\nhm\n</think>\n\nyes ", [(Kind.THOUGHT, "hm"), (Kind.TEXT, "yes ")]),
    ("\n<think></think>yes", [(Kind.TEXT, "yes")]),
    ("<think>never done ", [(Kind.THOUGHT, "never done")]),
    ("<think>a</think>", [(Kind.THOUGHT, "a")]),
    (
        f"<think>x < y</think>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
        [(Kind.THOUGHT, "x < y"), (Kind.CALL, ("weather", {"city": "Łódź"}))],
    ),
    (
        f"I will look.\n\n<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>",
        [
            (Kind.TEXT, "I will look."),
            (Kind.CALL, ("weather", {"city": "Łódź"})),
            (Kind.CALL, ("weather", {"city": "Łódź"})),
        ],
    ),
    (f"<tool_call>{WEATHER}", [(Kind.CALL, ("weather", {"city": "Łódź"}))]),
    (
        f"<tool_call>{WEATHER}</tool_call> done ",
        [(Kind.CALL, ("weather", {"city": "Łódź"})), (Kind.TEXT, "done ")],
    ),
    (
        "<tool_call>no json</tool_call> and on",
        [(Kind.TEXT, "<tool_call>no json</tool_call> and on")],
    ),
    (
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        [(Kind.TEXT, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>')],
    ),
    (
        "<tool_call>\n<function=list files>\n<parameter=path>\n/tmp\nx\n</parameter>\n"
        "<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>",
        [(Kind.CALL, ("list files", {"path": "/tmp\nx", "deep": True}))],
    ),
    ('{"name": "weather", "parameters": {}}', [(Kind.CALL, ("weather", {}))]),
    (
        f'<|python_tag|>{{"name": "weather", "parameters": {json.dumps({"a": 1})}}}',
        [(Kind.CALL, ("weather", {"a": 1}))],
    ),
    (f" [{WEATHER}, {WEATHER}] ", [(Kind.CALL, ("weather", {"city": "Łódź"}))] * 2),
    ('{"answer": 4}', [(Kind.TEXT, '{"answer": 4}')]),
    ("[1, 2]", [(Kind.TEXT, "[1, 2]")]),
    ("[]", [(Kind.TEXT, "[]")]),
    ("{ no json", [(Kind.TEXT, "{ no json")]),
    ("<think>t</think> {x", [(Kind.THOUGHT, "t"), (Kind.TEXT, "{x")]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_an_answer_is_taken_apart(text: str, expected: list[tuple[Kind, Any]]) -> None:
    assert told(read([text])) == expected


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_the_cut_of_the_pieces_changes_nothing(text: str, expected: list[tuple[Kind, Any]]) -> None:
    assert told(read(list(text))) == expected
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert told(read(pieces)) == expected, pieces


def test_text_passes_as_it_comes_where_there_is_nothing_to_read() -> None:
    reader = AnswerReader(frozenset(), reads_thoughts=False, is_thinking=False)
    for piece in (" ", "<think>", "<tool_call>", "{", "\n"):
        assert reader.push(piece) == [Part(Kind.TEXT, piece)]
    assert reader.finish() == []


def test_text_is_not_held_longer_than_it_must_be() -> None:
    reader = AnswerReader(TOOLS, reads_thoughts=True, is_thinking=False)
    assert reader.push("a") == [Part(Kind.TEXT, "a")]
    assert reader.push(" b <tool") == [Part(Kind.TEXT, " b")]
    assert reader.push("s") == [Part(Kind.TEXT, " <tools")]
    assert reader.finish() == []


def test_a_thought_that_the_prompt_opened_needs_no_mark() -> None:
    parts = read(["so ", "be it</thi", "nk>", "\nit is"], is_thinking=True)
    assert told(parts) == [(Kind.THOUGHT, "so be it"), (Kind.TEXT, "it is")]
    raw = read(["so be it</think>\nit is"], frozenset(), reads_thoughts=False, is_thinking=True)
    assert told(raw) == [(Kind.TEXT, "so be it</think>\nit is")]


def test_calls_are_not_read_where_no_tools_are_offered() -> None:
    text = f"<tool_call>{WEATHER}</tool_call>"
    assert told(read(list(text), frozenset())) == [(Kind.TEXT, text)]


def test_each_call_has_an_id_of_its_own() -> None:
    parts = read([f"<tool_call>{WEATHER}</tool_call>" * 3])
    ids = [part.call.id for part in parts if part.call is not None]
    assert len(set(ids)) == 3
    assert all(call_id.startswith("call_") for call_id in ids)


def test_json_that_is_nested_without_end_is_text() -> None:
    deep = "[" * 200_000
    assert told(read([deep])) == [(Kind.TEXT, deep)]
    tagged = f"<tool_call>{deep}</tool_call>"
    assert told(read([tagged])) == [(Kind.TEXT, tagged)]
