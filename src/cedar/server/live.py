"""`GET /v1/requests`, the live view of what runs, and `GET /`, the figures page with that view.

The view holds counts only, never a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from cedar import __version__
from cedar.engine.engine_status import RequestRow
from cedar.server.responses import json_response
from cedar.server.service import Service
from cedar.server.sse import EventStream, event

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0

_SCRIPT = """
<section id="cedar-live" hidden style="position:fixed;right:1rem;bottom:1rem;padding:.6rem .9rem;
font:13px/1.5 ui-monospace,monospace;background:#111d;color:#eee;border-radius:.5rem;z-index:9">
</section>
<script type="module">
const box = document.getElementById("cedar-live");
async function show() {
  try {
    const answer = await fetch("v1/requests");
    if (!answer.ok) return;
    const { queue, cache, store } = await answer.json();
    const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
    const disk = store && `, disk hits ${store.hits}/${store.lookups}, ` +
      `${megabytes(store.bytes_on_disk)} of ${megabytes(store.limit_bytes)}`;
    box.textContent = `running ${queue.running}, waiting ${queue.waiting}, KV blocks ` +
      `${cache.used_blocks}/${cache.total_blocks}, prefix hits ${cache.hit_tokens} tokens` +
      (disk ?? "");
    box.hidden = false;
  } catch { box.hidden = true; }
}
show();
setInterval(show, 1000);
</script>
"""


async def live_requests(request: HttpRequest) -> Response:
    """What runs and waits now; with `?stream=true` or `Accept: text/event-stream`, every second."""
    service: Service = request.app.state.service
    wants_stream = request.query_params.get("stream") in ("true", "1")
    if wants_stream or "text/event-stream" in request.headers.get("accept", ""):
        return EventStream(_follow(service), lambda: None)
    return json_response(view(service))


def view(service: Service) -> dict[str, Any]:
    """The live view as plain data."""
    snapshot, details = service.engine.snapshot(), service.engine.details()
    info, pool = service.engine.info, details.pool
    return {
        "object": "list",
        "data": [_row(request) for request in details.requests],
        "queue": {
            "running": snapshot.running, "waiting": snapshot.waiting,
            "max_num_seqs": info.config.max_num_seqs, "max_waiting": service.config.max_waiting,
            "preemptions": snapshot.preemptions,
        },
        "cache": {
            "block_size": info.config.block_size, "total_blocks": snapshot.total_blocks,
            "used_blocks": snapshot.total_blocks - snapshot.free_blocks,
            "cached_blocks": pool.cached, "evicted_blocks": pool.evicted,
            "hit_tokens": pool.adopted * info.config.block_size,
            "block_bytes": info.block_bytes, "window_bytes": details.window_bytes,
        },
        "store": None if details.disk is None else asdict(details.disk),
    }  # fmt: skip


async def page(request: HttpRequest) -> Response:
    """The figures page, or a small status page where it cannot be made."""
    service: Service = request.app.state.service
    state = request.app.state
    if state.page is None:
        try:
            state.page = await asyncio.to_thread(_figures, service.name)
        except Exception:  # the border: no page may ever stop the server
            logger.exception("the figures page cannot be made; serving the status page")
            state.page = _status_page(service)
    return HTMLResponse(state.page)


async def _follow(service: Service) -> AsyncGenerator[bytes, None]:
    while not service.is_draining:
        yield event(view(service))
        await asyncio.sleep(_INTERVAL_SECONDS)


def _row(row: RequestRow) -> dict[str, Any]:
    document = asdict(row)
    age = time.monotonic() - document.pop("arrival")
    return {"id": document.pop("request_id"), **document, "age_seconds": round(age, 3)}


def _figures(name: str) -> str:
    # Imported here: the page is not needed to serve, and its models are read from disk.
    from cedar.page.figures import DEFAULT_MODELS, page_data
    from cedar.page.page import first_request, page_planners, render_page

    models = [*DEFAULT_MODELS]
    if name in models:
        models.remove(name)
        models.insert(0, name)
    planners = page_planners(models, None)
    document = render_page(page_data(planners, first_request(None), "ced+csa2"))
    return document.replace("</body>", f"{_SCRIPT}</body>")


def _status_page(service: Service) -> str:
    name = html.escape(service.name)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>cedar: {name}</title><body>"
        f"<h1>cedar {__version__}</h1><p>Serving <code>{name}</code>. API at <code>/v1</code>, "
        f"metrics at <a href=metrics>/metrics</a>.</p>{_SCRIPT}</body></html>"
    )
