"""Chat messages as OpenAI's clients write them, checked.

Owns Message, Call, and `messages_of`, which every chat dialect goes through. Does not know
templates: what a message looks like in a prompt is theirs.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.wire.fields import Fields, shown, wrong

# What a part of a message may be besides text, on servers with models that can read it.
_MEDIA: Final = frozenset({"image_url", "input_audio", "input_video", "image", "file", "audio"})
_TEXT_PARTS: Final = {
    "text": "text",
    "refusal": "refusal",
}  # kinds of parts, and where their text is


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Any  # as parsed from JSON; a text that is no JSON stays as it is
    id: str = ""

    @property
    def arguments_json(self) -> str:
        """The arguments as clients get them."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    texts: tuple[str, ...] = ()  # its parts
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # whose result it is
    name: str | None = None
    others: dict[str, Any] = field(default_factory=dict)  # fields that a template may know

    @property
    def text(self) -> str:
        """Its parts as one text, as llama-server joins them."""
        return "\n".join(self.texts)


def messages_of(value: Any, name: str = "messages") -> list[Message]:
    """Check a list of messages. Raises InvalidRequest, and NotSupported for images and sound."""
    if value is None:
        raise InvalidRequest(f"{name} is missing; expected a list of messages")
    if not isinstance(value, list):
        raise wrong(name, value, "a list of messages")
    messages = [_message(item, f"{name}[{place}]") for place, item in enumerate(value)]
    if [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
        raise InvalidRequest("Cannot have 2 or more assistant messages at the end of the list.")
    return messages


def texts_of(content: Any, name: str) -> tuple[str, ...]:
    """The texts of a message's content: a string, or a list of parts. Raises as `messages_of`."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise wrong(name, content, "a string or a list of parts")
    return tuple(_text(part, f"{name}[{place}]") for place, part in enumerate(content))


def parsed_arguments(arguments: Any) -> Any:
    """The arguments of a call as a value; a text that is no JSON stays a text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


_KNOWN: Final = frozenset(
    {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}
)


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, dict):
        raise wrong(name, item, "an object with role and content")
    fields = Fields(item)
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise wrong(f"{name}.role", role, "a string such as user, assistant, system or tool")
    calls = _calls(fields.get("tool_calls"), f"{name}.tool_calls")
    if "content" not in item and not calls:
        raise InvalidRequest(f"{name} is {shown(item)}; expected content or tool_calls in it")
    return Message(
        role="system" if role == "developer" else role,
        texts=texts_of(fields.get("content"), f"{name}.content"),
        reasoning=fields.text("reasoning_content") or None,
        calls=calls,
        call_id=fields.text("tool_call_id") or None,
        name=fields.text("name") or None,
        others={key: value for key, value in item.items() if key not in _KNOWN},
    )


def _text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wrong(name, part, "an object with type and text")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        raise NotSupported(f"{name} is of type {kind}, and this server takes text alone")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise wrong(f"{name}.type", kind, "text")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise wrong(f"{name}.{_TEXT_PARTS[kind]}", text, "a string")
    return text


def _calls(value: Any, name: str) -> tuple[Call, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(name, value, "a list of calls")
    return tuple(_call(item, f"{name}[{place}]") for place, item in enumerate(value))


def _call(item: Any, name: str) -> Call:
    if not isinstance(item, dict):
        raise wrong(name, item, "an object with function")
    function = item.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f"{name}.function", function, "an object with name and arguments")
    arguments = parsed_arguments(function.get("arguments"))
    return Call(function["name"], arguments, Fields(item).text("id"))
