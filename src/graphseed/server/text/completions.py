"""Text completions: llama-server's /completion and OpenAI's /v1/completions.

Owns the routes and the order of things: read the body, make the prompts, make every generation
(which checks it), then run them, streamed or not. Does not know the shapes of answers.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.server.errors import NotSupported
from graphseed.server.generation import Piece
from graphseed.server.state import ServerState
from graphseed.server.text import completion_schemas as schemas
from graphseed.server.text.openai_shapes import TextCompletion
from graphseed.server.text.tokens import prompts_of
from graphseed.server.wire.fields import PROMPT, Fields, json_object, whole_body
from graphseed.server.wire.jobs import begin, open_generations, read_all, read_merged
from graphseed.server.wire.llama_shapes import Telling, final_object, partial_object
from graphseed.server.wire.params import parse
from graphseed.server.wire.replies import documented, json_reply
from graphseed.server.wire.sse import Event, event_stream, unless_gone


def router(state: ServerState) -> APIRouter:
    """/completion, /completions, /v1/completions, and /infill, which no model here can."""
    routes = APIRouter(tags=["completions"])
    native = documented(
        schemas.NATIVE_BODY, schemas.NATIVE_ANSWER, "Complete a text (llama-server's form).",
        streams=True,
    )  # fmt: skip

    async def complete(request: Request) -> Response:
        tellings = await _open(state, await _body(state, request))
        if tellings[0].asked.is_streaming:
            return await _streamed(request, _native_events(tellings), tellings, done=False)
        await unless_gone(request, _take_all(tellings))
        answers = [final_object(telling, is_streaming=False) for telling in tellings]
        return json_reply(answers[0] if len(answers) == 1 else answers)

    for path in ("/completion", "/completions"):
        routes.post(path, operation_id=path.strip("/"), **native)(complete)

    @routes.post(
        "/v1/completions",
        **documented(
            schemas.TEXT_BODY, schemas.TEXT_ANSWER, "Complete a text (OpenAI's form).",
            streams=True,
        ),
    )  # fmt: skip
    async def complete_text(request: Request) -> Response:
        body = await _body(state, request)
        _refuse_absent(Fields(body))
        tellings = await _open(state, body)
        shapes = TextCompletion(state)
        if tellings[0].asked.is_streaming:
            return await _streamed(request, _text_events(shapes, tellings), tellings, done=True)
        await unless_gone(request, _take_all(tellings))
        return json_reply(shapes.whole(tellings))

    @routes.post("/infill", **documented(schemas.NATIVE_BODY, {}, "Not supported."))
    async def infill(request: Request) -> Response:
        raise NotSupported("infill needs a model with fill-in-the-middle tokens, which is not here")

    return routes


async def _body(state: ServerState, request: Request) -> dict[str, Any]:
    return json_object(await whole_body(request), vocab_size=state.ready.model.vocab_size)


async def _open(state: ServerState, body: dict[str, Any]) -> list[Telling]:
    """Every generation that a body asks for, checked, and not begun."""
    state.check_can_generate()
    asked = parse(state, body)
    served = state.ready
    prompts = await prompts_of(served.model, served.engine.core.config, body.get(PROMPT))
    generations = await open_generations(state, prompts, asked)
    return [Telling(state, one, asked, index) for index, one in enumerate(generations)]


async def _take_all(tellings: list[Telling]) -> None:
    pieces = await read_all([telling.generation for telling in tellings])
    for telling, own in zip(tellings, pieces, strict=True):
        for piece in own:
            telling.take(piece)


async def _streamed(
    request: Request, events: AsyncGenerator[Event, None], tellings: list[Telling], *, done: bool
) -> Response:
    state, asked = tellings[0].state, tellings[0].asked
    begun = await begin([telling.generation for telling in tellings])
    return await event_stream(
        request, events, state.settings, begun=begun, ends_with_done=done,
        ping_seconds=asked.ping_seconds,
    )  # fmt: skip


async def _native_events(tellings: list[Telling]) -> AsyncGenerator[Event, None]:
    generations = [telling.generation for telling in tellings]
    async with aclosing(read_merged(generations)) as pieces:
        async for index, piece in pieces:
            telling = tellings[index]
            if piece is None:
                yield final_object(telling, is_streaming=True)
                continue
            entry = telling.take(piece)
            if _is_told(telling, piece):
                yield partial_object(telling, piece, entry)


async def _text_events(
    shapes: TextCompletion, tellings: list[Telling]
) -> AsyncGenerator[Event, None]:
    generations = [telling.generation for telling in tellings]
    async with aclosing(read_merged(generations)) as pieces:
        async for index, piece in pieces:
            telling = tellings[index]
            if piece is None:
                yield shapes.last_chunk(telling)
                continue
            entry = telling.take(piece)
            if _is_told(telling, piece):
                yield shapes.chunk(telling, piece, entry)
    if tellings[0].asked.includes_usage:
        yield shapes.usage_chunk(tellings)


def _is_told(telling: Telling, piece: Piece) -> bool:
    """Whether a piece makes a chunk: one for each token, also where its text is held back."""
    return piece.num_prompt_done is not None or telling.asked.n_predict != 0


def _refuse_absent(fields: Fields) -> None:
    if fields.flag("echo", False):
        raise NotSupported("echo is true, and the prompt's own log-probabilities are not computed")
    if fields.text("suffix"):
        raise NotSupported("suffix is given, and this server cannot insert text; leave it out")
