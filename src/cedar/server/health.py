"""`GET /health`, `/ready`, `/version`, `/metrics`: probes and scrapers; none needs a key.

/health says that the process works, /ready that a request sent now would be accepted.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from cedar import __version__
from cedar.server.responses import json_response
from cedar.server.service import Service


async def health(request: Request) -> Response:
    """200 while the engine lives, else 503 with the reason."""
    service: Service = request.app.state.service
    if service.engine.failure is not None:
        reason = f"the engine has died: {service.engine.failure}"
        return json_response({"status": "dead", "reason": reason}, 503)
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 when a request would be accepted now, else 503."""
    service: Service = request.app.state.service
    if service.is_ready:
        return json_response({"status": "ready"})
    status = (
        "draining" if service.is_draining else "busy" if service.engine.is_running else "stopped"
    )
    return json_response({"status": status}, 503)


async def version(request: Request) -> Response:
    """Version of cedar."""
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
