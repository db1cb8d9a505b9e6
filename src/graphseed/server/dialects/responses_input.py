"""Bodies of OpenAI's Responses API, as bodies of chat completions.

Owns `chat_body`. What both have in common (temperature, llama-server's own fields) is passed on as
it is. Does not know answers.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.wire.fields import Fields, shown, wrong

# Fields that need a memory of earlier requests, or what this server does not have.
_ABSENT: Final = ("previous_response_id", "conversation", "prompt")
# What is translated, and must not reach the chat's fields under its own name.
_OWN: Final = frozenset({
    "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "reasoning",
    "include", "top_logprobs",
})  # fmt: skip
_LOGPROBS: Final = "message.output_text.logprobs"


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request in the form of chat completions. Raises InvalidRequest and NotSupported."""
    _check_finite(body)
    fields = Fields(body)
    for name in _ABSENT:
        if name in fields:
            raise NotSupported(f"{name} is given, and this server keeps no responses; send the "
                               "whole conversation as input")  # fmt: skip
    if fields.get("background") is True:
        raise NotSupported("background is true, and this server answers while the client waits")
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat["messages"] = _messages(fields)
    if "max_output_tokens" in fields:
        chat["max_tokens"] = fields.whole("max_output_tokens", -1)
    if "effort" in fields.inner("reasoning"):
        chat["reasoning_effort"] = fields.inner("reasoning").text("effort")
    if "tools" in fields:
        chat["tools"] = _tools(fields.get("tools"))
    if "tool_choice" in fields:
        chat["tool_choice"] = fields.get("tool_choice")
    if "format" in fields.inner("text"):
        chat["response_format"] = _format(fields.inner("text").inner("format"))
    if _LOGPROBS in fields.texts("include"):
        chat |= {"logprobs": True, "top_logprobs": fields.whole("top_logprobs", 0)}
    return chat


def _check_finite(body: Mapping[str, Any]) -> None:
    """Refuse numbers that JSON cannot say: parts of the body are repeated in the response."""
    try:
        json.dumps(body, allow_nan=False)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError:
        raise InvalidRequest(
            "the body has an infinite number or NaN; expected finite ones"
        ) from None


def _messages(fields: Fields) -> list[Any]:
    messages: list[Any] = []
    instructions = fields.text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    value = fields.get("input")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("input", value, "a text or a list of items")
    for place, item in enumerate(value):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[Any], item: Any, name: str) -> None:
    """Add what an item says; an assistant's thoughts, words and calls in a row are one message."""
    if not isinstance(item, dict):
        raise wrong(name, item, "an object")
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(item, name)
        if message["role"] == "assistant":
            last = _assistants(messages, "content")
            last.pop("tool_calls", None)
            last |= message
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistants(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{name}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        thought = _thought(item, name)
        if thought:
            _assistants(messages, "content", "tool_calls")["reasoning_content"] = thought
    else:
        raise NotSupported(f"{name}.type is {shown(kind)}, and this server does not have it")


def _assistants(messages: list[Any], *ended_by: str) -> dict[str, Any]:
    """The assistant's message that is being made; a new one where it has one of these fields."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in ended_by):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    made: dict[str, Any] = last
    return made


def _message(item: dict[str, Any], name: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str):
        raise wrong(f"{name}.role", role, "user, assistant, system or developer")
    if "content" not in item:
        raise InvalidRequest(f"{name} is {shown(item)}; expected content in it")
    return {"role": role, "content": _content(item["content"], f"{name}.content")}


def _content(value: Any, name: str) -> Any:
    """A content in the chat's kinds of parts; what is wrong with it is found there."""
    if not isinstance(value, list):
        return value
    return [_part(part, f"{name}[{place}]") for place, part in enumerate(value)]


def _part(part: Any, name: str) -> Any:
    if not isinstance(part, dict):
        raise wrong(name, part, "an object with type")
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text")}
    if kind in ("input_image", "input_file", "input_audio"):
        raise NotSupported(f"{name} is of type {kind}, and this server takes text alone")
    return part


def _thought(item: dict[str, Any], name: str) -> str:
    """The words of a thought; what is encrypted cannot be read here."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise wrong(f"{name}.content", parts, "a list of parts")
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def _tools(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong("tools", value, "a list of tools")
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(value)]


def _tool(tool: Any, name: str) -> Any:
    if not isinstance(tool, dict):
        raise wrong(name, tool, "an object with type and name")
    if tool.get("type") != "function" or "function" in tool:  # the chat's form, or not supported
        return tool
    return {
        "type": "function",
        "function": {key: tool.get(key) for key in ("name", "description", "parameters")},
    }


def _format(form: Fields) -> dict[str, Any]:
    kind = form.get("type")
    if kind != "json_schema":
        return dict(form.body)
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
