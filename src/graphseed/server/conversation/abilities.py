"""What a chat template can do, found out by trying it.

Owns Abilities and the trials. Templates say nothing of it themselves: whether one has a system
role, shows tools and calls, and how, is seen in what it renders. Does not adapt conversations.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from graphseed.server.conversation.tools import NO_PARAMETERS, CallStyle

logger = logging.getLogger(__name__)

# Renders messages and tools in a template's own form; raises what the template raises.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]

_NEEDLE: Final = "qzxjk"  # a text that no template has of its own
_CALL_ID: Final = "call00001"  # nine characters, which some templates insist on


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a template does with a conversation, found out by trying."""

    wants_tool_list: bool = False  # an empty one where there are no tools
    wants_parts: bool = False  # contents as lists of parts
    takes_system: bool = True
    takes_tools: bool = False
    takes_calls: bool = False
    takes_results: bool = True  # messages of the role tool
    wants_argument_texts: bool = False  # of calls; most want objects
    call_style: CallStyle = CallStyle.TAGGED


def abilities_of(render: Render) -> Abilities:
    """Try a template. Raises nothing: a trial that it refuses shows nothing."""
    trials = [
        _Trial(render, wants_tool_list, wants_parts)
        for wants_parts in (False, True)
        for wants_tool_list in (False, True)
    ]
    trial = next((trial for trial in trials if trial.shows_user()), trials[0])
    takes_objects = _NEEDLE in trial.calling({"a": _NEEDLE})
    wants_texts = not takes_objects and _NEEDLE in trial.calling(json.dumps({"a": _NEEDLE}))
    arguments: Any = json.dumps({"a": "b"}) if wants_texts else {"a": "b"}
    return Abilities(
        wants_tool_list=trial.wants_tool_list,
        wants_parts=trial.wants_parts,
        takes_system=trial.shows_system(),
        takes_tools=trial.shows_tools(),
        takes_calls=takes_objects or wants_texts,
        takes_results=_NEEDLE in trial.calling(arguments, has_result=True),
        wants_argument_texts=wants_texts,
        call_style=_style(trial.calling(arguments)),
    )


def parts_of(texts: Sequence[str]) -> list[dict[str, str]]:
    """A content in parts."""
    return [{"type": "text", "text": text} for text in texts]


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error) or type(error).__name__).splitlines()[0]


class _Trial:
    """Conversations that a template is tried with, in one form."""

    def __init__(self, render: Render, wants_tool_list: bool, wants_parts: bool) -> None:
        self._render = render
        self.wants_tool_list = wants_tool_list
        self.wants_parts = wants_parts

    def shows_user(self) -> bool:
        """Whether the user's words are shown."""
        return _NEEDLE in self._rendered([self._message("user", _NEEDLE)])

    def shows_system(self) -> bool:
        """Whether the system's words are."""
        messages = [self._message("system", _NEEDLE), self._message("user", "a")]
        return _NEEDLE in self._rendered(messages)

    def shows_tools(self) -> bool:
        """Whether the name of a tool is."""
        function = {"name": _NEEDLE, "description": "a", "parameters": NO_PARAMETERS}
        tool = {"type": "function", "function": function}
        return _NEEDLE in self._rendered([self._message("user", "a")], [tool])

    def calling(self, arguments: Any, *, has_result: bool = False) -> str:
        """What a call of f is rendered to, and its result, which is the needle."""
        function = {"name": "f", "arguments": arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        messages = [
            self._message("user", "a"),
            self._message("assistant", "") | {"tool_calls": [call]},
        ]
        if has_result:
            result = self._message("tool", _NEEDLE)
            messages.append(result | {"name": "f", "tool_call_id": _CALL_ID})
        return self._rendered(messages)

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": parts_of([text]) if self.wants_parts else text}

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        try:
            return self._render(messages, tools or ([] if self.wants_tool_list else None))
        except Exception as error:  # a template can raise anything
            logger.debug("a trial of the chat template was refused: %s", first_line(error))
            return ""


def _style(rendered: str) -> CallStyle:
    """How a rendered call of a function f is written."""
    if "<function=f>" in rendered:
        return CallStyle.TAGGED_XML
    if "<tool_call>" in rendered:
        return CallStyle.TAGGED
    if "[TOOL_CALLS]" in rendered:
        return CallStyle.LIST
    return CallStyle.PLAIN if '"parameters"' in rendered else CallStyle.TAGGED
