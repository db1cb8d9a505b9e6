"""What a model wrote, read as it comes: thoughts, the answer's text, and calls of tools.

Owns AnswerReader and Part. It reads `<think>` thoughts, calls in `<tool_call>` tags (as JSON, or as
`<function=…>`), and answers that are nothing but JSON calls. Does not know requests or shapes.
"""

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from graphseed.server.conversation.messages import Call
from graphseed.server.conversation.prompt import END_THINK, THINK

CALL: Final = "<tool_call>"
END_CALL: Final = "</tool_call>"
_PYTHON_TAG: Final = "<|python_tag|>"  # Llama 3 may begin a call with it

_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?$", re.DOTALL)
_PARAMETER: Final = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)


class Kind(Enum):
    """What a part of an answer is."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer that is certain."""

    kind: Kind
    text: str = ""
    call: Call | None = None  # a whole one


class AnswerReader:
    """Takes the text of one answer as it comes. What could yet be a mark is held back.

    With no tool names and no thoughts to read, every text passes as it is.
    """

    def __init__(
        self, tool_names: frozenset[str], *, reads_thoughts: bool, is_thinking: bool
    ) -> None:
        self._tool_names = tool_names
        self._reads_thoughts = reads_thoughts
        self._held = ""
        self._trims = False  # blanks before what comes next are not part of the answer
        self._step: Callable[[bool], list[Part] | None] = self._begin
        if reads_thoughts and is_thinking:
            self._enter_thought()

    def push(self, text: str) -> list[Part]:
        """Take a piece and return what became certain."""
        self._held += text
        return self._run(False)

    def finish(self) -> list[Part]:
        """Return what is still held: no more text will come."""
        return self._run(True)

    def _run(self, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        # A step that brings something, be it nothing but a decision, is followed by another.
        while (brought := self._step(is_last)) is not None:
            parts += brought
        return parts

    def _begin(self, is_last: bool) -> list[Part] | None:
        """Nothing but blanks so far: decide what this is."""
        if not self._reads_thoughts and not self._tool_names:
            self._step = self._text
            return []
        start = self._held.lstrip()
        could_think = self._reads_thoughts and THINK.startswith(start[: len(THINK)])
        if not is_last and (not start or (could_think and len(start) < len(THINK))):
            return None
        if could_think and start.startswith(THINK):
            self._held = start.removeprefix(THINK)
            self._enter_thought()
        elif self._tool_names and start.startswith(("{", "[", _PYTHON_TAG)):
            self._step = self._json
        elif self._tool_names and not is_last and _PYTHON_TAG.startswith(start):
            return None
        else:
            self._step = self._text
        return []

    def _enter_thought(self) -> None:
        self._reads_thoughts = False  # there is one, at the beginning
        self._trims = True
        self._step = self._thought

    def _thought(self, is_last: bool) -> list[Part] | None:
        text, mark, rest = self._held.partition(END_THINK)
        if self._trims:
            text = text.lstrip()
        if mark:
            self._held, self._trims, self._step = rest, True, self._begin
            return _texts(Kind.THOUGHT, text.rstrip())
        return self._hand_out(Kind.THOUGHT, text, is_last, END_THINK)

    def _text(self, is_last: bool) -> list[Part] | None:
        if self._trims:
            self._held = self._held.lstrip()
        if not self._tool_names:
            text, self._held = self._held, ""
            self._trims = self._trims and not text
            return _texts(Kind.TEXT, text) or None
        text, mark, rest = self._held.partition(CALL)
        if mark:
            self._held, self._step = rest, self._call
            return _texts(Kind.TEXT, text.rstrip())
        return self._hand_out(Kind.TEXT, text, is_last, CALL)

    def _call(self, is_last: bool) -> list[Part] | None:
        body, mark, rest = self._held.partition(END_CALL)
        if not mark and not is_last:
            return None
        self._held, self._step = rest, self._text
        call = _tagged_call(body, self._tool_names)
        if call is None:
            self._trims = False
            return _texts(Kind.TEXT, CALL + body + mark)
        self._trims = True
        return [Part(Kind.CALL, call=call)]

    def _json(self, is_last: bool) -> list[Part] | None:
        """All of it may be calls: that is known at the end."""
        if not is_last:
            return None
        calls = _plain_calls(self._held.strip().removeprefix(_PYTHON_TAG), self._tool_names)
        text, self._held = self._held.lstrip() if self._trims else self._held, ""
        self._step = self._text
        return [Part(Kind.CALL, call=call) for call in calls] or _texts(Kind.TEXT, text)

    def _hand_out(self, kind: Kind, text: str, is_last: bool, mark: str) -> list[Part] | None:
        """Text that is certain: not the beginning of a mark, nor blanks that may stand before."""
        keep = 0 if is_last else _overlap(text, mark)
        certain = text[: len(text) - keep]
        if not is_last or kind is Kind.THOUGHT:
            certain = certain.rstrip()
        self._held = "" if is_last else text[len(certain) :]
        self._trims = self._trims and not certain
        return _texts(kind, certain) or None


def _texts(kind: Kind, text: str) -> list[Part]:
    return [Part(kind, text)] if text else []


def _tagged_call(body: str, names: frozenset[str]) -> Call | None:
    function = _FUNCTION.match(body)
    if function is not None:
        name, inner = function.group(1).strip(), function.group(2)
        found = {key.strip(): _value(text) for key, text in _PARAMETER.findall(inner)}
        return _named(name, found, names)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _call_of(value, names)


def _plain_calls(text: str, names: frozenset[str]) -> list[Call]:
    """The calls that a text is; none where it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    items = value if isinstance(value, list) else [value]
    calls = [_call_of(item, names) for item in items]
    return [call for call in calls if call is not None] if all(calls) else []


def _call_of(value: Any, names: frozenset[str]) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return _named(value["name"], arguments, names)


def _named(name: str, arguments: Any, names: frozenset[str]) -> Call | None:
    return Call(name, arguments, f"call_{uuid.uuid4().hex[:24]}") if name in names else None


def _value(text: str) -> Any:
    """A parameter's value: JSON where it is more than a text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
