"""/metrics: Prometheus' text, where the server was told to have it.

Owns the route. The numbers are those of Meters. Answers while the model sleeps.
"""

from typing import Final

from fastapi import APIRouter
from fastapi.responses import Response

from graphseed.server.errors import NotSupported
from graphseed.server.lifecycle import Lifecycle
from graphseed.server.state import ServerState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def router(state: ServerState, lifecycle: Lifecycle) -> APIRouter:
    """The route of /metrics; without --metrics it counts nothing and answers 501."""
    routes = APIRouter(tags=["metrics"])
    meters = None
    if state.settings.has_metrics:
        from graphseed.server.watch.meters import Meters  # needs a library that nobody else does

        meters = Meters()
        lifecycle.on_loaded(meters.attach)
        lifecycle.ledger.on_left(meters.record)
        lifecycle.graphs.on_observed(meters.observe)

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Counters, gauges and histograms",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    async def metrics() -> Response:
        """What happened since the server started."""
        if meters is None:
            raise NotSupported(
                "This server does not support metrics endpoint. Start it with --metrics"
            )
        started = str(int(state.started_at.timestamp()))
        return Response(
            meters.text(state.served),
            media_type=CONTENT_TYPE,
            headers={"Process-Start-Time-Unix": started},
        )

    return routes
