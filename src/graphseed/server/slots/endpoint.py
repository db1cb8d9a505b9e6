"""/slots: what each place for a request is doing, and the actions on one.

Owns llama-server's shape of a slot. What a slot does is the scheduler's.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request

from graphseed.capture.errors import GraphseedError
from graphseed.engine import Engine
from graphseed.server.errors import InvalidRequest, NotSupported, Unavailable
from graphseed.server.ledger import Ledger, Task
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.slots.slot_files import SlotFiles
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import Fields, json_body
from graphseed.server.wire.llama_shapes import settings_of_params

R = TypeVar("R")

_FAIL: Final[dict[str, Any]] = {
    "parameters": [{"name": "fail_on_no_slot", "in": "query", "schema": {"type": "string"}}]
}
_FILE: Final[dict[str, Any]] = {
    "type": "object", "properties": {"filename": {"type": "string", "minLength": 1}},
}  # fmt: skip
_ACTION: Final[dict[str, Any]] = {
    "parameters": [
        {"name": "id_slot", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "action", "in": "query", "required": True,
            "schema": {"type": "string", "enum": ["save", "restore", "erase"]},
        },
    ],
    "requestBody": {
        "description": "For save and restore",
        "content": {"application/json": {"schema": _FILE}},
    },
}  # fmt: skip


def router(state: ServerState, lifecycle: Lifecycle) -> APIRouter:
    """Routes of /slots."""
    routes = APIRouter(tags=["slots"])
    ledger = lifecycle.ledger
    files = SlotFiles(state, ledger)

    @routes.get("/slots", openapi_extra=_FAIL)
    async def slots(request: Request) -> list[dict[str, Any]]:
        """What each slot is doing; with `fail_on_no_slot`, 503 when every one is busy."""
        if not state.settings.has_slots:
            raise NotSupported("This server does not support slots endpoint. Start it with --slots")
        engine = state.ready.engine
        busy = await busy_slots(engine)
        num_slots = engine.core.config.num_parallel
        if request.query_params.get("fail_on_no_slot") and len(busy) == num_slots:
            raise Unavailable("no slot available", retry_after_seconds=1)
        return [_slot(engine, ledger, slot, is_busy=slot in busy) for slot in range(num_slots)]

    @routes.post("/slots/{id_slot}", openapi_extra=_ACTION)
    async def act(id_slot: str, request: Request) -> dict[str, Any]:
        """Save, restore or erase (`action`) what a slot knows."""
        if state.settings.slot_save_path is None:
            raise NotSupported(
                "This server does not support slots action. Start it with --slot-save-path"
            )
        slot = _slot_number(id_slot, state.ready.engine.core.config.num_parallel)
        match request.query_params.get("action", ""):
            case "save":
                return await files.save(slot, await _filename(request))
            case "restore":
                return await files.restore(slot, await _filename(request))
            case "erase":
                return await files.erase(slot)
            case other:
                raise InvalidRequest(f"action is {other!r:.80}; expected save, restore or erase")

    return routes


async def busy_slots(engine: Engine) -> frozenset[int]:
    """The slots that have a request, asked of the engine between two of its steps."""

    def read() -> frozenset[int]:
        slots = (sequence.slot for sequence in engine.core.scheduler.sequences)
        return frozenset(slot for slot in slots if slot is not None)

    return await _called(engine, read)


async def _filename(request: Request) -> str:
    name = Fields(await json_body(request)).text("filename")
    if not name:
        raise InvalidRequest("filename is not given; expected the name of a file")
    return name


async def _called(engine: Engine, function: Callable[[], R]) -> R:
    try:
        return await asyncio.to_thread(engine.call, function)
    except GraphseedError:
        raise
    except RuntimeError as error:  # the process is ending and takes no new threads
        raise Unavailable("the server is shutting down") from error


def _slot_number(text: str, num_slots: int) -> int:
    if not text.isascii() or not text.isdecimal() or int(text[:9]) >= num_slots or len(text) > 9:
        raise InvalidRequest(f"Invalid slot ID {text!r:.80}; expected 0 to {num_slots - 1}")
    return int(text)


def _slot(engine: Engine, ledger: Ledger, slot: int, *, is_busy: bool) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "id": slot,
        "n_ctx": engine.core.config.context_len,
        "speculative": False,
        "is_processing": is_busy,
    }
    task = ledger.last_of_slot(slot)
    return shape if task is None else {**shape, **_last_task(task, is_busy)}


def _last_task(task: Task, is_busy: bool) -> dict[str, Any]:
    request = task.request
    is_running = is_busy and task.is_open
    num_new = len(request.output_ids) if is_running else 0
    limit = request.params.max_tokens
    return {
        "id_task": task.number,
        "n_prompt_tokens": len(request.prompt_ids),
        "n_prompt_tokens_processed": len(request.prompt_ids) - request.num_cached,
        "n_prompt_tokens_cache": request.num_cached,
        "params": settings_of_params(request.params),
        "next_token": [
            {
                "has_next_token": is_running,
                "has_new_line": is_running and "\n" in request.text,
                "n_remain": limit - num_new if is_running and limit >= 0 else -1,
                "n_decoded": num_new,
            }
        ],
    }
