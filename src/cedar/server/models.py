"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cedar.server.responses import json_response
from cedar.server.service import Service


async def list_models(request: Request) -> Response:
    """Every served name."""
    service: Service = request.app.state.service
    entries = [_entry(service, name) for name in service.config.served_model_names]
    return json_response({"object": "list", "data": entries})


async def get_model(request: Request) -> Response:
    """One served name."""
    service: Service = request.app.state.service
    name = request.path_params["model"]
    service.check_model(name)
    return json_response(_entry(service, name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.started, "owned_by": "cedar",
        "root": service.name, "parent": None, "max_model_len": service.max_model_len,
    }  # fmt: skip
