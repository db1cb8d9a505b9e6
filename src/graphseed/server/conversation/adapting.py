"""Conversations adapted to chat templates that lack something, and in the form templates read.

Owns what becomes of a system message, tools, calls and their results where a template does not show
them. Does not render.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphseed.server.conversation.abilities import Abilities, parts_of
from graphseed.server.conversation.messages import Call, Message
from graphseed.server.conversation.tools import Tools, described, written_call


def adapted_to(abilities: Abilities, messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The conversation in the roles that a template has."""
    adapted = list(messages)
    if tools.names and not abilities.takes_tools:
        first = adapted.pop(0) if adapted and adapted[0].role == "system" else Message("system")
        adapted.insert(0, replace(first, texts=(*first.texts, described(tools))))
    if not abilities.takes_calls:
        adapted = [_with_calls_written(message) for message in adapted]
    if not abilities.takes_results:
        adapted = [_as_users(message) for message in adapted]
    return adapted if abilities.takes_system else _without_system(adapted)


def _with_calls_written(message: Message) -> Message:
    if not message.calls:
        return message
    written = (written_call(call) for call in message.calls)
    return replace(message, texts=(*filter(None, message.texts), *written), calls=())


def _as_users(message: Message) -> Message:
    if message.role != "tool":
        return message
    text = f"<tool_response>\n{message.text}\n</tool_response>"
    return replace(message, role="user", texts=(text,), name=None, call_id=None)


def _without_system(messages: list[Message]) -> list[Message]:
    """What the system says, said at the beginning of the user's next message."""
    kept: list[Message] = []
    held: tuple[str, ...] = ()
    for message in messages:
        if message.role == "system":
            held += message.texts
        elif message.role == "user" and held:
            kept.append(replace(message, texts=("\n\n".join((*held, message.text)),)))
            held = ()
        else:
            kept.append(message)
    return [*kept, Message("user", held)] if held else kept


def as_written(abilities: Abilities, message: Message) -> dict[str, Any]:
    """A message in the form that templates read."""
    content = parts_of(message.texts) if abilities.wants_parts else message.text
    written: dict[str, Any] = {**message.others, "role": message.role, "content": content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["tool_calls"] = [_call(call, abilities) for call in message.calls]
    if message.call_id is not None:
        written["tool_call_id"] = message.call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def _call(call: Call, abilities: Abilities) -> dict[str, Any]:
    arguments = call.arguments_json if abilities.wants_argument_texts else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
