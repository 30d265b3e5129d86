"""What the engine says about one token. No torch: the server's own process reads it too.

Made by `sampler.py` and `engine.py`; read by `LLM`, `AsyncEngine` and the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cedar.engine.request import FinishReason, Request


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability and its rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class StepOutput:
    """One new token of one request, or its end without one (abort).

    Attributes:
        request: live; whoever reads an output later sees the request as it is then. In the server's
            process, its own copy: what `engine_wire.py` sends is kept up to date in it.
        token_id: None only for an abort.
        logprobs: as asked for.
        finish_reason: why the request ended with this token; None when it went on.
    """

    request: Request
    token_id: int | None
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: FinishReason | None = None
