"""Tools as a client offers them, and the ways in which models write their calls.

Owns Tools, CallStyle, and the forms that force a call. Does not know templates, and does not read
answers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from graphseed.server.conversation.messages import Call
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.grammar.compile import MAX_BLANKS
from graphseed.server.grammar.schemas import checked_schema
from graphseed.server.wire.fields import Fields, shown, wrong

NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}
# The least that a template can be told of a tool; without them most templates fail.
_DEFAULTS: Final[dict[str, Any]] = {"description": "", "parameters": NO_PARAMETERS}


class CallStyle(Enum):
    """How a model writes a call, as its template shows it."""

    TAGGED = "tagged"  # <tool_call>{"name": …, "arguments": …}</tool_call>, as Hermes and Qwen
    TAGGED_XML = "tagged_xml"  # <tool_call><function=…><parameter=…>…, as Qwen3-Coder
    PLAIN = "plain"  # {"name": …, "parameters": …}, as Llama 3
    LIST = "list"  # [{"name": …, "arguments": …}], as Mistral


class Choice(Enum):
    """Whether tools may be called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called in one request."""

    offered: tuple[dict[str, Any], ...] = ()  # as OpenAI's clients and templates write them
    choice: Choice = Choice.NONE
    allows_several: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Names of what may be called; none where nothing may."""
        if self.choice is Choice.NONE:
            return frozenset()
        return frozenset(tool["function"]["name"] for tool in self.offered)

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call, and no text."""
        return self.choice is Choice.REQUIRED

    def only(self, name: str) -> "Tools":
        """The same with one tool, which must be called. Raises InvalidRequest."""
        if name not in {tool["function"]["name"] for tool in self.offered}:
            raise wrong("tool_choice", name, "the name of one of the tools")
        chosen = tuple(tool for tool in self.offered if tool["function"]["name"] == name)
        return replace(self, offered=chosen, choice=Choice.REQUIRED)


def tools_of(body: Mapping[str, Any], *, uses_jinja: bool) -> Tools:
    """What a body offers: `tools`, `tool_choice`, `parallel_tool_calls`. Raises InvalidRequest."""
    fields = Fields(body)
    offered = fields.get("tools")
    if offered is None or offered == []:
        if fields.get("tool_choice") not in (None, "none", "auto"):
            raise wrong("tool_choice", fields.get("tool_choice"), "none or auto, without tools")
        return Tools()
    if not isinstance(offered, list):
        raise wrong("tools", offered, "a list of tools")
    if not uses_jinja:
        raise InvalidRequest("tools param requires --jinja flag")
    tools = Tools(
        tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(offered)),
        Choice.AUTO,
        fields.flag("parallel_tool_calls", False),
    )
    return _chosen(tools, fields.get("tool_choice"))


def forced_form(tools: Tools, style: CallStyle, *, is_thinking: bool) -> dict[str, Any]:
    """The format (of xgrammar's structural tags) of an answer that is a call and nothing else.

    `is_thinking` says that the prompt has opened a thought, which comes first.
    """
    form = _calls_form(tools, style)
    if not is_thinking:
        return form
    thought = {
        "type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n",
    }  # fmt: skip
    return {"type": "sequence", "elements": [thought, form]}


def form_beside_schema(tools: Tools, style: CallStyle, schema: Any) -> dict[str, Any]:
    """The format of an answer that is a call, or JSON of a schema. Raises InvalidRequest."""
    return {"type": "or", "elements": [_calls_form(tools, style), _json_form(schema)]}


def written_call(call: Call) -> str:
    """A call in the tagged style, for templates that do not show calls."""
    body = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def described(tools: Tools) -> str:
    """What a model is told of its tools where the template tells it nothing."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.offered)
    return (
        "You can call these tools, given as one JSON object a line:\n"
        f"{lines}\n"
        "To call one, write this and nothing else:\n"
        '<tool_call>\n{"name": its name, "arguments": an object with its arguments}\n</tool_call>'
    )


def _tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(name, tool, "an object with type and function")
    kind = tool.get("type", "function")
    if kind != "function":
        raise NotSupported(f"{name}.type is {shown(kind)}, and this server has tools of type "
                           "function alone")  # fmt: skip
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f"{name}.function", function, "an object with a name")
    given = {key: value for key, value in function.items() if value is not None}
    checked_schema(given.get("parameters", NO_PARAMETERS))
    missing = {key: value for key, value in _DEFAULTS.items() if key not in given}
    return {"type": "function", "function": given | missing}


def _chosen(tools: Tools, choice: Any) -> Tools:
    if choice is None:
        return tools
    if isinstance(choice, str) and choice in {known.value for known in Choice}:
        return replace(tools, choice=Choice(choice))
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str):
            return tools.only(name)
    raise wrong("tool_choice", choice, "none, auto, required, or a function by its name")


def _calls_form(tools: Tools, style: CallStyle) -> dict[str, Any]:
    tags = [_tag(tool["function"], style) for tool in tools.offered]
    if style is CallStyle.LIST:
        inner = _tags(tags, ", ", is_single=not tools.allows_several)
        return {"type": "sequence", "elements": [_const("["), inner, _const("]")]}
    is_tagged = style in (CallStyle.TAGGED, CallStyle.TAGGED_XML)
    return _tags(tags, "\n", is_single=not (is_tagged and tools.allows_several))


def _tags(tags: list[dict[str, Any]], separator: str, *, is_single: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator", "tags": tags, "separator": separator,
        "at_least_one": True, "stop_after_first": is_single,
    }  # fmt: skip


def _tag(function: dict[str, Any], style: CallStyle) -> dict[str, Any]:
    name = json.dumps(function["name"], ensure_ascii=False)
    begin, end, kind = {
        CallStyle.TAGGED: (
            f'<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>", "json",
        ),
        CallStyle.TAGGED_XML: (
            f"<tool_call>\n<function={function['name']}>\n", "\n</function>\n</tool_call>",
            "qwen_xml",
        ),
        CallStyle.PLAIN: (f'{{"name": {name}, "parameters": ', "}", "json"),
        CallStyle.LIST: (f'{{"name": {name}, "arguments": ', "}", "json"),
    }[style]  # fmt: skip
    content = _json_form(function["parameters"]) | {"style": kind}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _json_form(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema", "json_schema": checked_schema(schema),
        "max_whitespace_cnt": MAX_BLANKS,
    }  # fmt: skip


def _const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
