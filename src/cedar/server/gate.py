"""`Gate`: what every HTTP request passes first: request id, API key, size limit. Pure ASGI."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedar.server.config import ServerConfig
from cedar.server.errors import ApiError, problem_of, to_response

#: Paths that need no key: probes, scrapers and the page, none of which shows a prompt.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
#: Longest request id that is echoed; a longer one is replaced.
_MAX_ID = 128


class Gate:
    """ASGI middleware.

    Args:
        app: what comes next.   config: keys and limits.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._limit = app, config.max_body_bytes
        self._keys = [_digest(key) for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not request_id or len(request_id) > _MAX_ID or not request_id.isascii():
            request_id = secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await to_response(problem_of(error))(scope, receive, send_with_id)
            return
        await self._app(scope, self._limited(receive), send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._keys and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = _digest(key.strip())
            # Every key is compared, and digests of one length: time says nothing about the keys.
            matches = [hmac.compare_digest(given, known) for known in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(
                    "this server needs an API key; send the header 'Authorization: Bearer KEY'",
                    status=401, headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._limit:
            raise self._too_large(length)

    def _limited(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message: dict[str, Any] = dict(await receive())
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large(f"more than {self._limit}")
            return message

        return counted

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            f"the request body has {size} bytes, the limit is {self._limit}; send less or raise "
            "--max-body-bytes",
            status=413,
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
