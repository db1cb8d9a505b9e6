"""Chat completions: OpenAI's /v1/chat/completions with llama-server's fields, and its count.

Owns the routes, and Vertex AI's /predict, which wraps the same requests. Does not know the shapes
of answers.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.server.conversation.turn import Turn, count_tokens, open_turn, read_turns
from graphseed.server.dialects import chat_schemas as schemas
from graphseed.server.dialects.chat_shapes import ChatCompletion, ChoiceStream
from graphseed.server.errors import NotSupported
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import Fields, json_body, shown, wrong
from graphseed.server.wire.jobs import begin
from graphseed.server.wire.replies import documented, json_reply
from graphseed.server.wire.sse import Event, event_stream, unless_gone

MAX_INSTANCES: Final = 128  # of one /predict
# Fields that ask for what this server does not have; their absence is what is supported.
_ABSENT: Final = ("audio", "functions", "function_call", "prediction", "web_search_options")


def router(state: ServerState) -> APIRouter:
    """/v1/chat/completions, /chat/completions, their input_tokens, and /predict."""
    routes = APIRouter(tags=["chat"])
    chat = documented(schemas.CHAT_BODY, schemas.CHAT_ANSWER, "Answer a chat.", streams=True)
    count = documented(schemas.COUNT_BODY, schemas.COUNT_ANSWER, "Count the tokens of a chat.")

    async def complete(request: Request) -> Response:
        turn = await _open(state, await json_body(request))
        shapes = ChatCompletion(state)
        if turn.asked.is_streaming:
            begun = await begin(turn.generations)
            return await event_stream(
                request, _events(shapes, turn), state.settings, ends_with_done=True,
                begun=begun, ping_seconds=turn.asked.ping_seconds,
            )  # fmt: skip
        await unless_gone(request, read_turns(turn))
        return json_reply(shapes.whole(turn))

    async def input_tokens(request: Request) -> Response:
        num = await count_tokens(state, await json_body(request))
        return json_reply({"input_tokens": num, "object": "response.input_tokens"})

    for path in ("/chat/completions", "/v1/chat/completions"):
        name = path.strip("/")
        routes.post(path, operation_id=name, **chat)(complete)
        routes.post(f"{path}/input_tokens", operation_id=f"{name}/input_tokens", **count)(
            input_tokens
        )

    @routes.post(
        "/v1/chat/completions/control",
        **documented({"type": "object"}, {}, "Not supported."),
    )
    async def control(_: Request) -> Response:
        raise NotSupported("a thought cannot be ended from outside; cancel the request instead")

    @routes.post(
        "/predict",
        **documented(schemas.PREDICT_BODY, schemas.PREDICT_ANSWER, "Answer chats (Vertex AI)."),
    )
    async def predict(request: Request) -> Response:
        instances = _instances(Fields(await json_body(request)))
        turns = [await _open(state, instance) for instance in instances]
        await unless_gone(request, read_turns(*turns))
        return json_reply({"predictions": [ChatCompletion(state).whole(turn) for turn in turns]})

    return routes


async def _open(state: ServerState, body: dict[str, Any]) -> Turn:
    for name in _ABSENT:
        if body.get(name) is not None:
            raise NotSupported(f"{name} is given, and this server does not have it; leave it out")
    if set(Fields(body).texts("modalities")) - {"text"}:
        raise NotSupported(
            f"modalities is {shown(body['modalities'])}, and this server writes text"
        )
    return await open_turn(state, body)


async def _events(shapes: ChatCompletion, turn: Turn) -> AsyncGenerator[Event, None]:
    streams = [ChoiceStream(shapes, answer) for answer in turn.answers]
    async with aclosing(turn.steps()) as steps:
        async for step in steps:
            for chunk in streams[step.answer.telling.index].chunks(step):
                yield chunk
    if turn.asked.includes_usage:
        yield shapes.usage_chunk(turn)


def _instances(fields: Fields) -> list[dict[str, Any]]:
    """The requests that a body of /predict holds."""
    value = fields.get("instances")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INSTANCES:
        raise wrong("instances", value, f"a list of 1 to {MAX_INSTANCES} requests")
    instances = []
    for place, instance in enumerate(value):
        name = f"instances[{place}]"
        if not isinstance(instance, dict):
            raise wrong(name, instance, "an object")
        kind = instance.get("@requestFormat", "chatCompletions")
        if kind not in ("chatCompletions", "chat_completions"):
            raise NotSupported(f"{name}.@requestFormat is {shown(kind)}; this server has "
                               "chatCompletions")  # fmt: skip
        if instance.get("stream"):
            raise NotSupported(f"{name}.stream is true, and predictions are not streamed")
        instances.append(instance)
    return instances
