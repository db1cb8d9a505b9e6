"""OpenAI's Responses API: /v1/responses, streamed and not, and its count of tokens.

Owns the routes. A request becomes one of chat completions; nothing is kept of it. Does not know the
shapes of answers.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.server.conversation.turn import Turn, count_tokens, open_turn, read_turns
from graphseed.server.dialects.chat_schemas import COUNT_ANSWER
from graphseed.server.dialects.responses_input import chat_body
from graphseed.server.dialects.responses_shapes import ResponseObject, ResponseStream
from graphseed.server.errors import NotSupported
from graphseed.server.state import ServerState
from graphseed.server.text.completion_schemas import SAMPLING
from graphseed.server.wire.fields import json_body
from graphseed.server.wire.jobs import begin
from graphseed.server.wire.replies import documented, json_reply
from graphseed.server.wire.sse import Event, event_stream, unless_gone

_INPUT: Final[dict[str, Any]] = {
    "input": {
        "description": "a text, or a list of messages, calls and their results",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
    },
    "instructions": {"type": ["string", "null"], "description": "what the system says"},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"description": "none, auto, required, or a function by its name"},
    "reasoning": {"type": ["object", "null"]},
}
_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        **SAMPLING,
        **_INPUT,
        "max_output_tokens": {"type": ["integer", "null"], "minimum": -1},
        "text": {"type": ["object", "null"], "description": "{format}: text or a JSON schema"},
    },
}
_COUNT_BODY: Final[dict[str, Any]] = {
    "type": "object", "required": ["input"], "properties": _INPUT,
}  # fmt: skip
_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["id", "object", "status", "output", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": {"type": "array", "minItems": 1},
        "usage": {"type": "object"},
    },
}


def router(state: ServerState) -> APIRouter:
    """/v1/responses, /responses, and their input_tokens."""
    routes = APIRouter(tags=["responses"])
    respond = documented(_BODY, _ANSWER, "Answer (OpenAI's Responses API).", streams=True)
    count = documented(_COUNT_BODY, COUNT_ANSWER, "Count the tokens of an input.")

    async def create(request: Request) -> Response:
        body = await json_body(request)
        turn = await _open(state, body)
        (answer,) = turn.answers
        response = ResponseObject(state, body, answer)
        if turn.asked.is_streaming:
            stream = ResponseStream(response, answer)
            begun = await begin(turn.generations)
            return await event_stream(
                request, _events(turn, stream), state.settings, ends_with_done=False,
                begun=begun, ping_seconds=turn.asked.ping_seconds, error_event=stream.error,
            )  # fmt: skip
        await unless_gone(request, read_turns(turn))
        return json_reply(response.whole())

    async def input_tokens(request: Request) -> Response:
        num = await count_tokens(state, chat_body(await json_body(request)))
        return json_reply({"input_tokens": num, "object": "response.input_tokens"})

    for path in ("/responses", "/v1/responses"):
        name = path.strip("/")
        routes.post(path, operation_id=name, **respond)(create)
        routes.post(f"{path}/input_tokens", operation_id=f"{name}/input_tokens", **count)(
            input_tokens
        )
    return routes


async def _open(state: ServerState, body: dict[str, Any]) -> Turn:
    chat = chat_body(body)
    for name in ("n", "n_cmpl"):
        if chat.get(name) not in (None, 1):
            raise NotSupported(f"{name} is {chat[name]!r}, and a response has one answer")
    return await open_turn(state, chat)


async def _events(turn: Turn, stream: ResponseStream) -> AsyncGenerator[Event, None]:
    async with aclosing(turn.steps()) as steps:
        async for step in steps:
            for frame in stream.frames(step):
                yield frame
