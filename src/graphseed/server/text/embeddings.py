"""Embeddings: OpenAI's /v1/embeddings and llama-server's /embedding.

Owns the shapes of their bodies and answers, and how a vector is normalised. What is pooled from a
prompt's hidden states is the engine's.
"""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.engine import Pooling, PromptTooLong
from graphseed.engine import Request as EngineRequest
from graphseed.server.errors import Failed, InvalidRequest, NotSupported
from graphseed.server.state import ServerState
from graphseed.server.text import embedding_schemas as schemas
from graphseed.server.text.pooled import InputTooLong, run_all
from graphseed.server.text.tokens import prompts_of
from graphseed.server.wire.fields import Fields, json_body, wrong
from graphseed.server.wire.replies import documented, json_reply
from graphseed.server.wire.sse import unless_gone

Vector = npt.NDArray[np.float32]

EUCLIDEAN: Final = 2
BLOCKING_VALUES: Final = 20_000  # an answer of more is written beside the event loop
_INT16_RANGE: Final = 32760.0  # what llama-server scales the largest component to
_MEDIA: Final = frozenset({"image_url", "input_audio", "input_image", "input_video"})


def router(state: ServerState) -> APIRouter:
    """/v1/embeddings and /embedding(s)."""
    routes = APIRouter(tags=["embeddings"])

    @routes.post(
        "/v1/embeddings",
        **documented(schemas.OPENAI_BODY, schemas.OPENAI_OR_NATIVE, "Embed texts (OpenAI's form)."),
    )
    async def embeddings(request: Request) -> Response:
        return await _answer(state, request, is_openai=True)

    async def native(request: Request) -> Response:
        return await _answer(state, request, is_openai=False)

    described = documented(
        schemas.NATIVE_BODY, schemas.NATIVE_ANSWER, "Embed texts (llama-server's form)."
    )
    for path in ("/embedding", "/embeddings"):
        routes.post(path, operation_id=path.strip("/"), **described)(native)

    return routes


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a body asks for besides its inputs."""

    is_openai: bool
    is_base64: bool
    norm: int


def normalized(vector: Vector, norm: int) -> Vector:
    """A vector divided by its size, as llama-server's embd_normalize says; zeros stay zeros.

    -1: as it is; 0: the largest component becomes 32760; p: the p-norm becomes 1.
    """
    wide = vector.astype(np.float64)
    sizes = np.abs(wide)
    largest = float(sizes.max())
    if norm == -1 or largest == 0.0:
        return vector
    if norm == 0:
        scale = largest / _INT16_RANGE
    else:  # divided first: powers of a small or large component are out of range
        scale = largest * float(((sizes / largest) ** float(norm)).sum()) ** (1 / norm)
    return (wide / scale).astype(np.float32)


async def _answer(state: ServerState, request: Request, *, is_openai: bool) -> Response:
    settings = state.settings
    if not settings.embeds:
        raise NotSupported("This server does not support embeddings. Start it with `--embeddings`")
    if is_openai and settings.pooling is Pooling.NONE:
        raise InvalidRequest(
            "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
        )
    fields = Fields(await json_body(request))
    wanted = _wanted(state, fields, is_openai)
    requests = await _open(state, fields)
    await unless_gone(request, run_all(state, requests))
    num_values = sum(len(row) for one in requests for row in one.embedding or ())
    if num_values <= BLOCKING_VALUES:
        return _reply(state, requests, wanted)
    return await asyncio.to_thread(_reply, state, requests, wanted)


def _wanted(state: ServerState, fields: Fields, is_openai: bool) -> Wanted:
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", form, '"float" or "base64"')
    norm = fields.whole("embd_normalize", EUCLIDEAN)
    if norm < -1:
        raise wrong("embd_normalize", norm, "-1 (none), 0 (max absolute), 1, 2, or a p above")
    hidden_size = state.ready.model.hidden_size
    num_dimensions = fields.whole("dimensions", hidden_size)
    if num_dimensions < 1:
        raise wrong("dimensions", num_dimensions, f"{hidden_size}, or nothing")
    if num_dimensions != hidden_size:
        raise NotSupported(
            f"dimensions is {num_dimensions}, and this model's embeddings have {hidden_size} and "
            "are not shortened; leave it out"
        )
    # llama-server's own name for the input asks for its own form of answer.
    return Wanted(is_openai and fields.get("input") is not None, form == "base64", norm)


async def _open(state: ServerState, fields: Fields) -> list[EngineRequest]:
    """A request for each input, checked, and not begun. Raises ApiError and RequestError."""
    given = fields.get("input")
    given = fields.get("content") if given is None else given
    if given is None:
        raise InvalidRequest('"input" or "content" must be provided')
    if given == []:
        raise InvalidRequest('"input" must not be empty')
    served = state.ready
    core = served.engine.core
    try:
        prompts = await prompts_of(served.model, core.config, _with_parts_joined(given))
        make = partial(core.embedding_request, pooling=state.settings.pooling)
        requests = [make(prompt) for prompt in prompts]
    except PromptTooLong as error:
        raise InputTooLong(error.num_tokens, error.context_len) from None
    for made in requests:
        made.set_deadline(state.settings.timeout_seconds)
    return requests


def _with_parts_joined(value: Any) -> Any:
    """Inputs with OpenAI's lists of content parts as texts; others as they are."""
    if isinstance(value, list):
        return [_with_parts_joined(item) if isinstance(item, dict) else item for item in value]
    if not isinstance(value, dict) or "content" not in value:
        return value
    parts = value["content"]
    if not isinstance(parts, list):
        raise wrong("content of an input", parts, "a list of parts")
    return {"prompt_string": "".join(_text_of(part) for part in parts)}


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise NotSupported(f"a part of an input is {kind}, and this server takes text alone")
    if kind != "text" or "text" not in part:
        raise wrong("a part of an input", part, "an object of the type text, with a text")
    return Fields(part).text("text")


def _reply(state: ServerState, requests: Sequence[EngineRequest], wanted: Wanted) -> Response:
    matrices = [np.asarray(one.embedding, dtype=np.float32) for one in requests]
    if not all(np.isfinite(matrix).all() for matrix in matrices):
        raise Failed("the model's hidden states are no finite numbers (try --dtype fp32)")
    if state.settings.pooling is not Pooling.NONE:
        matrices = [normalized(matrix[0], wanted.norm)[None] for matrix in matrices]
    if not wanted.is_openai:
        return json_reply(
            [{"index": i, "embedding": matrix.tolist()} for i, matrix in enumerate(matrices)]
        )
    num_tokens = sum(len(one.prompt_ids) for one in requests)
    return json_reply(
        {
            "model": state.name,
            "object": "list",
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "data": [_item(i, matrix[0], wanted) for i, matrix in enumerate(matrices)],
        }
    )


def _item(index: int, vector: Vector, wanted: Wanted) -> dict[str, Any]:
    shape: dict[str, Any] = {"object": "embedding", "index": index}
    if not wanted.is_base64:
        return {**shape, "embedding": vector.tolist()}
    told = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {**shape, "embedding": told, "encoding_format": "base64"}
