"""/prompt-graphs: which graphs there are, what became of each observation, and giving them back.

Owns the shapes of that, which /props tells too. What is told comes from a GraphWatch: asking never
disturbs the engine. Answers while the model sleeps.
"""

import asyncio
import time
from statistics import median
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from graphseed.capture.errors import GraphseedError
from graphseed.capture.events import Released
from graphseed.capture.identity import Namespace
from graphseed.capture.tally import Counts
from graphseed.engine import Engine
from graphseed.server.errors import Unavailable
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.state import ServerState
from graphseed.server.watch.graph_values import Observation, RaisedAlarm, Row
from graphseed.server.watch.graph_watch import GraphWatch
from graphseed.server.wire.fields import Fields, json_object, whole_body, wrong
from graphseed.server.wire.replies import json_reply

_MAX_SEQ: Final = (1 << 53) - 1  # what every reader of JSON can hold
_RELEASE_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "namespace": {
            "type": "string", "enum": ["prompt", "decode"],
            "description": "Which graphs to give back; both where it is absent.",
        }
    },
}  # fmt: skip


class IdentityShape(BaseModel):
    """One identity, from the first time it was seen."""

    id: int
    namespace: str
    first_node: str
    tokens: int  # rows of a step, padding included
    batch: int  # sequences, padding included
    reads: str
    state: str
    observations: int
    direct: int
    seeded: int
    replayed: int
    nodes: int
    bytes: int
    capture_ms: float
    instantiate_ms: float
    # Medians of what the last 15 runs took on the host; 0 where there was none.
    direct_ms: float
    replay_ms: float
    last_reason: str
    identity: str


class ObservationShape(BaseModel):
    """One thing that happened; decode steps that are alike are told together."""

    seq: int
    at: float  # seconds of the Unix clock
    namespace: str
    kind: str
    tokens: int
    batch: int
    count: int
    host_ms: float  # captures and releases excluded
    capture_ms: float
    why: str


class NamespaceShape(BaseModel):
    """What happened in a namespace, and what it holds now."""

    candidates: int
    seeded: int
    replayed: int
    direct: int
    stale: int
    refused: int
    quarantined: int
    released: int
    deferred: int
    bytes: int
    max_bytes: int
    tokens: int  # real ones, in steps so far
    hit_rate: float  # replayed / candidates


class AlarmShape(BaseModel):
    """Seeds without replays."""

    at: float
    namespace: str
    message: str
    field: str | None
    is_active: bool  # no replay has answered it


class RequestsShape(BaseModel):
    """Requests in the engine."""

    processing: int
    waiting: int


class GraphsShape(BaseModel):
    """The state of graphs: with `after`, of identities and timeline only what changed since."""

    policy: str
    selected_by: str
    decode_graphs: bool
    warnings: list[str]
    device: str
    summary: list[str]
    namespaces: dict[str, NamespaceShape]
    identities: list[IdentityShape]
    alarms: list[AlarmShape]
    is_sleeping: bool
    requests: RequestsShape
    epoch: int  # changes when the model was loaded again: the identities are others then
    seq: int  # what to give as `after` next time
    missed: int  # of the timeline, since `after`
    now: float
    timeline: list[ObservationShape]


class ReleaseShape(BaseModel):
    """What came back from one namespace."""

    namespace: str
    entries: int
    bytes_held: int
    bytes_returned: int
    ms: float


class ReleasesShape(BaseModel):
    """What came back."""

    released: list[ReleaseShape]


def router(state: ServerState, lifecycle: Lifecycle) -> APIRouter:
    """Routes of /prompt-graphs; from here on every engine is watched."""
    routes = APIRouter(tags=["prompt graphs"])
    watch = lifecycle.graphs
    lifecycle.on_loaded(watch.attach)

    @routes.get("/prompt-graphs", response_model=None, responses={200: {"model": GraphsShape}})
    async def prompt_graphs(after: Annotated[int, Query(ge=0, le=_MAX_SEQ)] = 0) -> Response:
        """The policy, what selected it, every identity, and the timeline after `after`."""
        return json_reply(_whole(state, watch, after))

    @routes.post(
        "/prompt-graphs/release",
        response_model=None,
        responses={200: {"model": ReleasesShape}},
        openapi_extra={"requestBody": {"content": {"application/json": {"schema": _RELEASE_BODY}}}},
    )
    async def release(request: Request) -> Response:
        """Give the captured graphs of both namespaces back, or of the one that is named."""
        namespaces = await _asked(request)
        served = state.served
        if served is None:  # asleep: nothing is held
            return json_reply({"released": [_nothing(name) for name in namespaces]})
        return json_reply({"released": await _release(served.engine, watch, namespaces)})

    return routes


def describe(state: ServerState, watch: GraphWatch) -> dict[str, Any]:
    """What /props tells of graphs: policy, what selected it, summary, every identity, alarms."""
    seen = watch.seen()
    return {**_head(state, watch), **_told(watch, seen.rows, seen.alarms, seen.tokens)}


def _whole(state: ServerState, watch: GraphWatch, after: int) -> dict[str, Any]:
    seen = watch.seen(after)
    scheduler = state.served.engine.core.scheduler if state.served is not None else None
    return {
        **_head(state, watch),
        **_told(watch, seen.rows, seen.alarms, seen.tokens),
        "is_sleeping": state.is_sleeping,
        "requests": {
            "processing": 0 if scheduler is None else scheduler.num_running,
            "waiting": 0 if scheduler is None else scheduler.num_waiting,
        },
        "epoch": seen.epoch,
        "seq": seen.seq,
        "missed": seen.num_missed,
        "now": time.time(),
        "timeline": [_observation(one) for one in seen.observations],
    }


def _head(state: ServerState, watch: GraphWatch) -> dict[str, Any]:
    selection, tally = state.selection, watch.tally
    return {
        "policy": selection.prompt.value,
        "selected_by": selection.source,
        "decode_graphs": not selection.are_graphs_disabled,
        "warnings": list(selection.warnings),
        "device": "" if tally is None else tally.device,
        "summary": [] if tally is None else [tally.line(namespace) for namespace in Namespace],
    }


def _told(
    watch: GraphWatch,
    rows: tuple[Row, ...],
    alarms: tuple[RaisedAlarm, ...],
    tokens: dict[Namespace, int],
) -> dict[str, Any]:
    tally = watch.tally
    return {
        "namespaces": {
            namespace.value: _namespace(
                Counts() if tally is None else tally.counts[namespace],
                watch.budgets[namespace].max_bytes if namespace in watch.budgets else 0,
                tokens[namespace],
            )
            for namespace in Namespace
        },
        "identities": [_identity(row) for row in rows],
        "alarms": [
            {
                "at": alarm.at_seconds, "namespace": alarm.namespace.value,
                "message": alarm.message, "field": alarm.field, "is_active": alarm.is_active,
            }
            for alarm in alarms
        ],
    }  # fmt: skip


def _namespace(counts: Counts, max_bytes: int, tokens: int) -> dict[str, Any]:
    names = (
        "candidates", "seeded", "replayed", "direct", "stale", "refused", "quarantined",
        "released", "deferred", "bytes",
    )  # fmt: skip
    return {
        **{name: getattr(counts, name) for name in names},
        "max_bytes": max_bytes,
        "tokens": tokens,
        "hit_rate": counts.replayed / counts.candidates if counts.candidates else 0.0,
    }


def _identity(row: Row) -> dict[str, Any]:
    identity = row.identity
    structure = dict(identity.structure)
    return {
        "id": row.number,
        "namespace": identity.namespace.value,
        "first_node": str(identity.first_node),
        "tokens": structure.get("tokens"),
        "batch": structure.get("batch"),
        "reads": structure.get("reads"),
        "state": row.state.value,
        "observations": row.num_direct + row.num_replayed,
        "direct": row.num_direct,
        "seeded": row.num_seeded,
        "replayed": row.num_replayed,
        "nodes": row.num_nodes,
        "bytes": row.num_bytes,
        "capture_ms": _ms(row.capture_ns),
        "instantiate_ms": _ms(row.instantiate_ns),
        "direct_ms": _ms(int(median(row.direct_ns or (0,)))),
        "replay_ms": _ms(int(median(row.replay_ns or (0,)))),
        "last_reason": row.last_reason,
        "identity": str(identity),
    }


def _observation(one: Observation) -> dict[str, Any]:
    return {
        "seq": one.seq,
        "at": round(one.at_seconds, 4),
        "namespace": one.namespace.value,
        "kind": one.kind.value,
        "tokens": one.tokens,
        "batch": one.batch,
        "count": one.count,
        "host_ms": _ms(one.host_ns),
        "capture_ms": _ms(one.capture_ns),
        "why": one.why,
    }


async def _asked(request: Request) -> tuple[Namespace, ...]:
    """The namespaces that a release names; no body at all means both."""
    raw = await whole_body(request)
    if not raw.strip():
        return tuple(Namespace)
    fields = Fields(json_object(raw))
    if "namespace" not in fields:
        return tuple(Namespace)
    name = fields.text("namespace")
    try:
        return (Namespace(name),)
    except ValueError:
        raise wrong("namespace", name, "prompt or decode") from None


async def _release(
    engine: Engine, watch: GraphWatch, namespaces: tuple[Namespace, ...]
) -> list[dict[str, Any]]:
    cache = engine.core.cache

    def release() -> list[dict[str, Any]]:
        told = []
        for namespace in namespaces:
            before = watch.last_released(namespace)
            cache.release(namespace)
            event = watch.last_released(namespace)
            is_new = event is not None and event is not before
            told.append(_came_back(event) if event and is_new else _nothing(namespace))
        return told

    try:
        return await asyncio.to_thread(engine.call, release)
    except GraphseedError:
        raise
    except RuntimeError as error:  # the process is ending and takes no new threads
        raise Unavailable("the server is shutting down") from error


def _came_back(event: Released) -> dict[str, Any]:
    return {
        "namespace": event.namespace.value,
        "entries": event.num_entries,
        "bytes_held": event.bytes_held,
        "bytes_returned": event.bytes_returned,
        "ms": _ms(event.elapsed_ns),
    }


def _nothing(namespace: Namespace) -> dict[str, Any]:
    return {
        "namespace": namespace.value, "entries": 0, "bytes_held": 0, "bytes_returned": 0, "ms": 0.0,
    }  # fmt: skip


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 4)
