"""What is being served: /health, /models and /props, as llama-server has them.

Owns their shapes, and the state of prompt graphs that /props adds. Answers while the model sleeps:
only the facts about it are told.
"""

import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from graphseed.capture.identity import Namespace
from graphseed.server.errors import NotSupported, Unavailable, of_exception
from graphseed.server.facts import ModelFacts
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.state import ServerState
from graphseed.server.wire.llama_shapes import settings_of_params

GraphState = Callable[[ServerState], dict[str, Any]]


def router(
    state: ServerState, lifecycle: Lifecycle, graph_state: GraphState | None = None
) -> APIRouter:
    """Routes that say how the server is. `graph_state` adds to what /props tells of graphs."""
    routes = APIRouter(tags=["status"])

    @routes.get("/health")
    @routes.get("/v1/health")
    async def health() -> dict[str, str]:
        """Whether requests are answered: also while the model sleeps."""
        _facts(lifecycle)
        if state.served is not None and state.served.engine.ended is not None:
            raise Unavailable(of_exception(state.served.engine.ended).message)
        return {"status": "ok"}

    @routes.get("/models")
    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return _models(state, _facts(lifecycle))

    @routes.get("/props")
    async def props() -> dict[str, Any]:
        """The server's settings, its model, and the state of its prompt graphs."""
        graphs = graphs_of(state) | (graph_state(state) if graph_state is not None else {})
        return {**_props(state, _facts(lifecycle)), "prompt_graphs": graphs}

    @routes.post("/props")
    async def change_props() -> dict[str, bool]:
        """Change settings; there is none yet that can be."""
        if not state.settings.has_props:
            raise NotSupported(
                "This server does not support changing global properties. Start it with --props"
            )
        return {"success": True}

    return routes


def graphs_of(state: ServerState) -> dict[str, Any]:
    """Which policy captures prompt graphs, what selected it, and the summary so far (I10)."""
    selection = state.selection
    shape: dict[str, Any] = {
        "policy": selection.prompt.value,
        "selected_by": selection.source,
        "decode_graphs": not selection.are_graphs_disabled,
        "warnings": list(selection.warnings),
        "summary": [],
    }
    if state.served is not None:
        tally = state.served.engine.core.tally
        shape["summary"] = [tally.line(namespace) for namespace in Namespace]
    return shape


def _facts(lifecycle: Lifecycle) -> ModelFacts:
    facts = lifecycle.facts
    if facts is None:
        raise Unavailable("Loading model")
    return facts


def _models(state: ServerState, facts: ModelFacts) -> dict[str, Any]:
    name, settings = state.name, state.settings
    head = "completion" if facts.can_generate else "rerank"
    abilities = [head, *(["embedding"] if settings.embeds else [])]
    # Its first list is what clients of Ollama read.
    listed = {
        "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model",
        "description": "", "tags": [""], "capabilities": abilities, "parameters": "",
        "details": {
            "parent_model": "", "format": "gguf" if ".gguf" in state.model_path else "",
            "family": "", "families": [""], "parameter_size": "", "quantization_level": "",
        },
    }  # fmt: skip
    model = {
        "id": name,
        "aliases": sorted(settings.aliases or (name,)),
        "tags": sorted(settings.tags),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "graphseed",
        "meta": {
            "vocab_type": facts.vocab_type, "n_vocab": facts.vocab_size,
            "n_ctx": facts.slot_context_len, "n_ctx_train": facts.model_context_len,
            "n_embd": facts.hidden_size, "n_params": facts.num_parameters,
            "size": facts.weight_bytes, "ftype": facts.file_type,
        },
    }  # fmt: skip
    return {"models": [listed], "object": "list", "data": [model]}


def _props(state: ServerState, facts: ModelFacts) -> dict[str, Any]:
    settings = state.settings
    return {
        "default_generation_settings": {
            "params": settings_of_params(settings.defaults),
            "n_ctx": facts.slot_context_len,
        },
        "total_slots": facts.num_slots,
        "model_alias": state.name,
        "model_ftype": facts.file_type,
        "model_path": state.model_path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": settings.has_slots,
        "endpoint_props": settings.has_props,
        "endpoint_metrics": settings.has_metrics,
        "ui": settings.has_ui,
        "ui_settings": {},
        "chat_template": facts.chat_template,
        "chat_template_caps": dict(facts.chat_template_caps),
        "bos_token": facts.bos_token,
        "eos_token": facts.eos_token,
        "build_info": state.build,
        "device": facts.device,
        "is_sleeping": state.is_sleeping,
        "cors_proxy_enabled": False,
    }
