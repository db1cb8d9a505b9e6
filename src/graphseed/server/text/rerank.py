"""Reranking: documents in the order in which they answer a query, in Jina's form and in TEI's.

Owns the routes, the shapes of their bodies and answers, and the order. A model that can has one
score for a query with a document (`models.heads`); any other is answered with 501.

Each document becomes one prompt with the query, and each prompt one request whose last row is
scored, so prompt graphs serve them as they serve any prompt. How the two are joined is the model's
(`models.pairs`): by `--chat-template` where one was given, by the tokenizer's template named
"rerank", by its chat template if that has the roles query and document, or else as
`tokenizer(query, document)` joins them. llama-server knows the second of these; where there is no
template it puts end-of-sequence tokens between the two, which is how encoders were trained, while
decoders were trained through their own tokenizer.

A score is what the head says, without a sigmoid, as from llama-server.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.engine import ModelCannot, PromptTooLong
from graphseed.engine import Request as EngineRequest
from graphseed.models.errors import ModelError, ModelUnsupported
from graphseed.models.model import Model
from graphseed.server.conversation.named_templates import NAMED
from graphseed.server.errors import Failed, InvalidRequest, NotSupported
from graphseed.server.state import ServerState
from graphseed.server.text import rerank_schemas as schemas
from graphseed.server.text.pooled import InputTooLong, run_all
from graphseed.server.text.tokens import BLOCKING_CHARACTERS
from graphseed.server.wire.fields import Fields, json_body, wrong
from graphseed.server.wire.replies import documented, json_reply
from graphseed.server.wire.sse import unless_gone

PAIR_CHARACTERS: Final = 200  # that tokenising a pair takes as long as, however short it is


def router(state: ServerState) -> APIRouter:
    """/rerank and its three other spellings."""
    routes = APIRouter(tags=["rerank"])

    async def rerank(request: Request) -> Response:
        asked = _asked(Fields(await json_body(request)))
        model = state.ready.model
        if model.can_generate:
            raise ModelCannot(state.name, model.kind)
        requests = await _open(state, asked)
        await unless_gone(request, run_all(state, requests))
        return json_reply(_answer(state, asked, requests))

    described = documented(
        schemas.BODY, schemas.ANSWER, "Rank documents by a query: models with a head for it can."
    )
    for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
        routes.post(path, operation_id=path.strip("/").replace("/", "_"), **described)(rerank)
    return routes


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for."""

    query: str
    documents: tuple[str, ...]
    top_n: int  # of the best to tell
    is_tei: bool  # its form: it says "texts"
    returns_text: bool  # in TEI's form


def _asked(fields: Fields) -> Asked:
    """Check a body. Raises InvalidRequest."""
    if "query" not in fields:
        raise InvalidRequest('"query" must be provided')
    is_tei = "texts" in fields
    name = "texts" if is_tei else "documents"
    documents = fields.get(name)
    is_texts = isinstance(documents, list) and all(isinstance(one, str) for one in documents)
    if not documents or not is_texts:
        raise wrong(name, documents, "a non-empty list of strings")
    top_n = fields.whole("top_n", len(documents))
    if top_n < 0:
        raise wrong("top_n", top_n, "a number of documents")
    returns_text = fields.flag("return_text", False)
    return Asked(fields.text("query"), tuple(documents), top_n, is_tei, is_tei and returns_text)


async def _open(state: ServerState, asked: Asked) -> list[EngineRequest]:
    """A request for each document, checked, and not begun. Raises ApiError and RequestError."""
    served = state.ready
    core = served.engine.core
    num, room = len(asked.documents), core.config.num_parallel + core.config.max_waiting
    if num > room:
        raise InvalidRequest(
            f"the request has {num} documents; expected at most {room}, which is what this server "
            "lets run and wait"
        )
    wanted = state.settings.chat_template
    template = None if wanted is None else NAMED.get(wanted, wanted)
    num_characters = num * len(asked.query) + sum(map(len, asked.documents))
    try:
        if num_characters + num * PAIR_CHARACTERS < BLOCKING_CHARACTERS:
            prompts = _pairs(served.model, asked, template)
        else:
            prompts = await asyncio.to_thread(_pairs, served.model, asked, template)
        requests = [core.score_request(prompt) for prompt in prompts]
    except PromptTooLong as error:
        raise InputTooLong(error.num_tokens, error.context_len) from None
    except ModelUnsupported as error:  # the template is none for this
        raise NotSupported(str(error)) from None
    except ModelError as error:
        raise InvalidRequest(str(error)) from None
    for made in requests:
        made.set_deadline(state.settings.timeout_seconds)
    return requests


def _pairs(model: Model, asked: Asked, template: str | None) -> list[list[int]]:
    return [model.pair(asked.query, document, template) for document in asked.documents]


def _answer(
    state: ServerState, asked: Asked, requests: Sequence[EngineRequest]
) -> dict[str, Any] | list[dict[str, Any]]:
    scores = [one.score for one in requests if one.score is not None and isfinite(one.score)]
    if len(scores) != len(requests):
        raise Failed("the model's scores are no finite numbers (try --dtype fp32)")
    # The sort is stable: of equal scores the document that was named first comes first.
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    label = "score" if asked.is_tei else "relevance_score"
    results: list[dict[str, Any]] = [{"index": index, label: scores[index]} for index in best]
    if asked.returns_text:
        results = [one | {"text": asked.documents[one["index"]]} for one in results]
    if asked.is_tei:
        return results
    num_tokens = sum(len(one.prompt_ids) for one in requests)
    return {
        "model": state.name,
        "object": "list",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": results,
    }
