"""The ASGI app of a service: routes, error pages, lifetime of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cedar import __version__
from cedar.errors import CedarError
from cedar.server import health, live, models, tokenization
from cedar.server.chat import chat_completions
from cedar.server.completions import completions
from cedar.server.errors import ApiError, problem_of, to_response
from cedar.server.gate import Gate
from cedar.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    schema_of,
)
from cedar.server.service import Service

Handler = Callable[[Request], Awaitable[Response]]

#: Status of a request whose client left before it was read; nobody sees it (nginx's number).
CLIENT_LEFT = 499


def create_app(service: Service) -> FastAPI:
    """The app; its lifespan starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.is_draining = True
        await asyncio.to_thread(service.engine.stop)  # the loop still reads its last events

    app = FastAPI(
        title="cedar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service, app.state.page = service, None
    for path, handler, kind in (
        ("/v1/chat/completions", chat_completions, ChatBody),
        ("/v1/completions", completions, CompletionBody),
        ("/tokenize", tokenization.tokenize, TokenizeBody),
        ("/detokenize", tokenization.detokenize, DetokenizeBody),
    ):
        _add_post(app, path, handler, kind)
    for path, handler in (
        ("/v1/models", models.list_models),
        ("/v1/models/{model:path}", models.get_model),
        ("/v1/requests", live.live_requests),
        ("/health", health.health),
        ("/ready", health.ready),
        ("/version", health.version),
        ("/metrics", health.metrics),
        ("/", live.page),
    ):
        app.add_api_route(path, handler, methods=["GET"], response_class=Response)
    for error in (CedarError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, _on_error)
    app.add_middleware(Gate, config=service.config)
    return app


def _add_post(app: FastAPI, path: str, handler: Handler, kind: type[Body]) -> None:
    content = {"application/json": {"schema": schema_of(kind)}}
    app.add_api_route(
        path, handler, methods=["POST"], response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )  # fmt: skip


def _no_route(request: Request, error: HTTPException) -> Exception:
    """Say what was asked for and what there is, where HTTP itself only has the status."""
    path = request.url.path[:200]
    if error.status_code == 404:
        served = ", ".join(sorted(route.path for route in request.app.routes))
        return ApiError(f"there is nothing at {path!r}; served: {served}", status=404)
    if error.status_code == 405:
        headers = dict(error.headers or {})
        allowed = headers.get("Allow", "another method")
        message = f"{request.method[:20]} is not served at {path!r}; allowed: {allowed}"
        return ApiError(message, status=405, headers=headers)
    return error


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    service: Service = request.app.state.service
    if isinstance(error, HTTPException):
        error = _no_route(request, error)
    problem = problem_of(error, service.config.retry_after_seconds)
    service.metrics.refused(problem.status)
    return to_response(problem)
