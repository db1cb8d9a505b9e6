"""Bodies of Anthropic's Messages API, as bodies of chat completions.

Owns `chat_body`. What both have in common (temperature, llama-server's own fields) is passed on as
it is. Does not know answers.
"""

from collections.abc import Mapping
from typing import Any, Final

from graphseed.server.errors import Failed, InvalidRequest, NotSupported
from graphseed.server.wire.fields import Fields, shown, wrong

DEFAULT_MAX_TOKENS: Final = 4096  # llama-server's, where a request does not say

# What is translated, and must not reach the chat's fields under its own name.
_OWN: Final = frozenset({
    "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "metadata",
    "max_tokens", "n", "n_cmpl",
})  # fmt: skip
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request in the form of chat completions. Raises ApiError."""
    fields = Fields(body)
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat["messages"] = _system(fields) + _messages(fields)
    chat["max_tokens"] = fields.whole("max_tokens", DEFAULT_MAX_TOKENS)
    if "stop_sequences" in fields:
        chat["stop"] = list(fields.texts("stop_sequences"))
    if "tools" in fields:
        chat["tools"] = _tools(fields.get("tools"))
    choice = fields.inner("tool_choice")
    if "tool_choice" in fields:
        chat["tool_choice"] = _choice(choice)
    if chat.get("tools"):
        chat["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use", True)
    if "thinking" in fields:
        thinks = fields.inner("thinking").get("type") != "disabled"
        given = fields.inner("chat_template_kwargs").body
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, **given}
    return chat


def _system(fields: Fields) -> list[Any]:
    system = fields.get("system")
    if system is None or system == []:
        return []
    if not isinstance(system, str | list):
        raise wrong("system", system, "a text or a list of text blocks")
    return [{"role": "system", "content": system}]


def _messages(fields: Fields) -> list[Any]:
    value = fields.get("messages")
    if value is None:
        raise InvalidRequest("messages is missing; expected a list of messages")
    if not isinstance(value, list):
        raise wrong("messages", value, "a list of messages")
    messages: list[Any] = []
    for place, message in enumerate(value):
        messages += _message(message, f"messages[{place}]")
    return messages


def _message(message: Any, name: str) -> list[Any]:
    """A message is one of the chat's, or several: results of tools are messages of their own."""
    if not isinstance(message, dict):
        raise wrong(name, message, "an object with role and content")
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    made: list[dict[str, Any]] = []
    for place, block in enumerate(content):
        _add_block(made, message.get("role"), block, f"{name}.content[{place}]")
    return made or [{**message, "content": ""}]


def _add_block(made: list[dict[str, Any]], role: Any, block: Any, name: str) -> None:
    if not isinstance(block, dict):
        raise wrong(name, block, "an object with type")
    match block.get("type"):
        case "text":
            _latest(made, role)["content"].append({"type": "text", "text": block.get("text")})
        case "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            _latest(made, role).setdefault("tool_calls", []).append(call)
        case "tool_result":
            made.append({
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _result(block, name),
            })  # fmt: skip
        case "thinking":
            latest = _latest(made, role)
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise wrong(f"{name}.thinking", thought, "a text")
            latest["reasoning_content"] = latest.get("reasoning_content", "") + thought
        case "redacted_thinking":
            pass  # nobody but who wrote it can read it
        case kind:
            raise _unknown(kind, name)


def _latest(made: list[dict[str, Any]], role: Any) -> dict[str, Any]:
    if not made or made[-1]["role"] == "tool":
        made.append({"role": role, "content": []})
    return made[-1]


def _result(block: dict[str, Any], name: str) -> Any:
    content = block.get("content")
    if isinstance(content, list):
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise _unknown(kind, f"{name}.content[{place}]")
    return "" if content is None else content


def _unknown(kind: Any, name: str) -> Exception:
    if kind == "image":  # llama-server's status, which its clients' tests know
        return Failed(f"{name}: image input is not supported; this server takes text alone")
    if kind in ("document", "search_result", "server_tool_use", "web_search_tool_result"):
        return NotSupported(f"{name}.type is {shown(kind)}, and this server does not have it")
    return wrong(f"{name}.type", kind, "text, tool_use, tool_result or thinking")


def _tools(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong("tools", value, "a list of tools")
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(value)]


def _tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(name, tool, "an object with name and input_schema")
    if tool.get("type", "custom") not in ("custom", None):
        raise NotSupported(f"{name}.type is {shown(tool['type'])}; this server has no tools of "
                           "its own")  # fmt: skip
    if not isinstance(tool.get("name"), str):
        raise wrong(f"{name}.name", tool.get("name"), "a text")
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        },
    }


def _choice(choice: Fields) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.text("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", kind, "auto, any, none or tool")
    return _CHOICES[kind]
