"""``/metrics`` and ``/stats``: metrics for Prometheus, and statistics for the page at ``/``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millpond.server.schemas.stats import Stats
from millpond.server.state import metrics_of

router = APIRouter(tags=["The server"])

_FORMATS = {
    "description": "The text format, or OpenMetrics where the Accept header asks for it.",
    "content": {"text/plain": {"schema": {"type": "string"}}, "application/openmetrics-text": {}},
}


@router.get("/metrics", response_class=Response, responses={200: _FORMATS})
def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    # Not a coroutine, so that it runs in a thread: with many routes and models it takes a while.
    content, content_type = metrics_of(request).text(request.headers.get("accept"))
    return Response(content, headers={"Content-Type": content_type})


@router.get("/stats")
async def stats(request: Request) -> Stats:
    """Queues, and the throughput of the last seconds."""
    return Stats.model_validate(metrics_of(request).stats())
