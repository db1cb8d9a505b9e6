"""Anthropic's Messages API: /v1/messages, streamed and not, and its count of tokens.

Owns the routes, and their form of errors. A request becomes one of chat completions. Does not know
the shapes of answers.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.capture.errors import GraphseedError
from graphseed.server.conversation.turn import Turn, count_tokens, open_turn, read_turns
from graphseed.server.dialects.anthropic_input import chat_body
from graphseed.server.dialects.anthropic_shapes import MessageObject, MessageStream, error_body
from graphseed.server.errors import ApiError, Failed, of_exception
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import json_body
from graphseed.server.wire.jobs import begin
from graphseed.server.wire.replies import documented, json_reply
from graphseed.server.wire.sse import Event, event_stream, unless_gone

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

_BLOCKS: Final[dict[str, Any]] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
}
_COUNTED: Final[dict[str, Any]] = {
    "messages": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": _BLOCKS},
        },
    },
    "system": {"description": "a text or a list of text blocks"},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"type": ["object", "null"]},
    "thinking": {"type": ["object", "null"], "description": "its budget is not kept to"},
}
_COUNT_BODY: Final[dict[str, Any]] = {
    "type": "object", "required": ["messages"], "properties": _COUNTED,
}  # fmt: skip
_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["messages"],
    "properties": _COUNTED
    | {
        "max_tokens": {"type": ["integer", "null"], "minimum": -1, "description": "default: 4096"},
        "stop_sequences": {"type": ["array", "null"], "items": {"type": "string"}},
        "stream": {"type": ["boolean", "null"]},
        "temperature": {"type": ["number", "null"]},
        "top_k": {"type": ["integer", "null"]},
        "top_p": {"type": ["number", "null"]},
    },
}
_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["id", "type", "role", "content", "model", "stop_reason", "usage"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        "model": {"type": "string"},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"type": "object"},
    },
}
_COUNT_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer"}},
}


def router(state: ServerState) -> APIRouter:
    """/v1/messages and /v1/messages/count_tokens."""
    routes = APIRouter(tags=["messages"])

    @routes.post(
        "/v1/messages",
        **documented(_BODY, _ANSWER, "Answer (Anthropic's Messages API).", streams=True),
    )
    async def create(request: Request) -> Response:
        return await _told_their_way(request, answer)

    @routes.post(
        "/v1/messages/count_tokens",
        **documented(_COUNT_BODY, _COUNT_ANSWER, "Count the tokens of messages."),
    )
    async def count(request: Request) -> Response:
        return await _told_their_way(request, number)

    async def answer(request: Request) -> Response:
        turn = await open_turn(state, chat_body(await json_body(request)))
        message = MessageObject(state, turn.answers[0])
        if turn.asked.is_streaming:
            stream = MessageStream(message)
            begun = await begin(turn.generations)
            return await event_stream(
                request, _events(turn, stream), state.settings, ends_with_done=False,
                begun=begun, ping_seconds=turn.asked.ping_seconds, error_event=stream.error,
            )  # fmt: skip
        await unless_gone(request, read_turns(turn))
        return json_reply(message.whole())

    async def number(request: Request) -> Response:
        num = await count_tokens(state, chat_body(await json_body(request)))
        return json_reply({"input_tokens": num})

    return routes


async def _told_their_way(request: Request, handler: Handler) -> Response:
    """Answer with their form of an error where there is one."""
    try:
        return await handler(request)
    except (ApiError, GraphseedError) as error:
        told = of_exception(error)
        if isinstance(told, Failed) and told is not error:
            logger.error("a request failed in the engine", exc_info=error)
        reply = json_reply(error_body(told), told.status)
        reply.headers.update(told.headers)
        return reply


async def _events(turn: Turn, stream: MessageStream) -> AsyncGenerator[Event, None]:
    async with aclosing(turn.steps()) as steps:
        async for step in steps:
            for frame in stream.frames(step):
                yield frame
