"""Exceptions -> HTTP status and OpenAI error object. Called by `app`, `gate` and `sse`.

Types are spelled as vLLM spells them; `code` is the status.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cedar.errors import (
    CedarError,
    DoesNotFitError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    UsageError,
)

logger = logging.getLogger(__name__)

#: Status of errors that HTTP itself or the server raises, by the type they are given.
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(CedarError):
    """A refusal that only HTTP knows: wrong key, unknown model, too large, shutting down.

    Args:
        message: the full sentence.   status: HTTP status.
        param: field of the request.   headers: to send along.
        extra: further members of the error object.
    """

    def __init__(
        self, message: str, *, status: int, param: str | None = None,
        headers: dict[str, str] | None = None, extra: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param = status, param
        self.headers, self.extra = headers or {}, extra or {}


@dataclass(frozen=True)
class Problem:
    """An error as a client sees it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def problem_of(error: BaseException, retry_after: int = 1) -> Problem:
    """What to tell the client; anything unexpected is logged and shown as an internal error.

    Args:
        retry_after: seconds named with 429.
    """
    if isinstance(error, ApiError):
        return _problem(error.status, str(error), error.param, error.headers, error.extra)
    if isinstance(error, RequestError):
        return _problem(400, str(error), error.param)
    if isinstance(error, (UsageError, DoesNotFitError)):
        return _problem(400, str(error))
    if isinstance(error, QueueFullError):
        return _problem(429, str(error), headers={"Retry-After": str(retry_after)})
    if isinstance(error, EngineDeadError):
        return _problem(500, str(error))
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return _problem(error.status_code, str(error.detail), headers=headers)
    logger.error("request failed", exc_info=error)
    return _problem(500, "internal error; the server's log has the details")


def to_response(problem: Problem) -> Response:
    """The answer to a request that failed before any byte was sent."""
    return Response(
        msgspec.json.encode(problem.body), problem.status, problem.headers, "application/json"
    )


def _problem(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
) -> Problem:  # fmt: skip
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    error = {"message": message, "type": kind, "param": param, "code": status, **(extra or {})}
    return Problem(status, {"error": error}, headers or {})
