"""`CompletionText`: the text side of one completion, token by token. Called by `llm` and the server.

Joins UTF-8-safe detokenisation and stop strings; says when a stop string has ended the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from cedar.text.detokenizer import Decoder, IncrementalDetokenizer
from cedar.text.stop import StopStrings


class CompletionText:
    """Text of one completion.

    Args:
        tokenizer: decodes ids.   stop: strings that end the text and are left out of it.
        skip_special_tokens: leave control tokens out of the text.

    Attributes:
        text: everything released so far.
        stop_reason: the stop string that ended the text; None while none has.
    """

    def __init__(
        self, tokenizer: Decoder, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stop)
        self.text = ""
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token; the text that may be shown now. Nothing more comes after a stop string."""
        if self.stop_reason is not None:
            return ""
        return self._release(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The completion has ended: release what was held back."""
        if self.stop_reason is not None:
            return ""
        delta = self._release(self._detokenizer.finish())
        if self.stop_reason is None:
            rest = self._stops.finish()
            self.text += rest
            delta += rest
        return delta

    def _release(self, new: str) -> str:
        delta, self.stop_reason = self._stops.push(new)
        self.text += delta
        return delta
