"""/apply-template: what a conversation looks like to the model.

Owns the route alone; conversations are rendered where the chat endpoints render them.
"""

from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.server.conversation.prompt import opened
from graphseed.server.dialects.chat_schemas import CONVERSATION
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import json_body
from graphseed.server.wire.replies import documented, json_reply

_BODY: Final[dict[str, Any]] = {
    "type": "object", "required": ["messages"], "properties": CONVERSATION,
}  # fmt: skip
_ANSWER: Final[dict[str, Any]] = {
    "type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}},
}  # fmt: skip


def router(state: ServerState) -> APIRouter:
    """/apply-template."""
    routes = APIRouter(tags=["chat"])

    @routes.post("/apply-template", **documented(_BODY, _ANSWER, "Render a conversation."))
    async def apply_template(request: Request) -> Response:
        conversation = await opened(state, await json_body(request))
        return json_reply({"prompt": conversation.prompt})

    return routes
