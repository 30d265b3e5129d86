"""`Completion`: one choice on its way to a client: ids in, text and log-probabilities out.

Shared by chat and plain completions; knows no HTTP and no JSON.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from cedar.engine.output import Logprob, StepOutput
from cedar.engine.request import FinishReason, Request
from cedar.server.metrics import Metrics
from cedar.text.completion import CompletionText


@dataclass(slots=True)
class Piece:
    """What one token added. Not frozen: one is made per token, and freezing triples its cost.

    Attributes:
        text: released now; often empty.
        token_ids: none for an abort.
        logprobs: the token's entry first, then the likely ones; None when not asked for.
        finish_reason, stop_reason: set on the last piece.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion:
    """State of one choice.

    Args:
        request: in the engine.   index: number of the choice in the response.
        text: None for a model without tokenizer.
        silent_ids: control tokens that never become text.
        stop_ids: ids that the client named; only they are shown as `stop_reason`.
        metrics: told about tokens and the end.

    Attributes:
        num_tokens: taken so far.   finish_reason: None while it runs.
    """

    def __init__(
        self, request: Request, index: int, text: CompletionText | None, *,
        silent_ids: Collection[int], stop_ids: Collection[int], metrics: Metrics,
    ) -> None:  # fmt: skip
        self.request, self.index = request, index
        self._text, self._silent, self._stop_ids = text, silent_ids, stop_ids
        self._metrics = metrics
        self._last: float | None = None
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def take(self, output: StepOutput) -> Piece:
        """Take the next token."""
        text, token, reason = "", output.token_id, output.finish_reason
        if token is not None:
            self._count()
            if reason is not FinishReason.STOP and token not in self._silent:
                text = "" if self._text is None else self._text.push(token)
        stop_reason: str | int | None = None
        if reason is not None and self._text is not None:
            text += self._text.finish()
        if self._text is not None and self._text.stop_reason is not None:
            reason, stop_reason = FinishReason.STOP, self._text.stop_reason
        elif reason is FinishReason.STOP and token in self._stop_ids:
            stop_reason = token
        if reason is not None:
            self.end(reason.value)
        return Piece(
            text,
            () if token is None else (token,),
            output.logprobs,
            self.finish_reason,
            stop_reason,
        )

    def end(self, reason: str) -> None:
        """Note the end, once."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._metrics.finished(self.request, reason, self.num_tokens)

    def _count(self) -> None:
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token(self.request)
        self._metrics.token(None if self._last is None else now - self._last)
        self._last = now
        self.num_tokens += 1
