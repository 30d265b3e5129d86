"""Streaming detokenisation: text leaves as soon as its characters are certain.

Lives here: the incremental decoder of one sequence.  Does not live here: stop strings
(:mod:`cedar.text.stop`), which look at the text this module releases.  Called once per generated
token.
"""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A run of broken bytes keeps the last character uncertain for ever; past this many pending tokens
# the certain ones are cut off, so that a step costs the same at any length.
_MAX_PENDING = 32
_KEPT = 8


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``."""
        ...


class IncrementalDetokenizer:
    """Turns the ids of one sequence into text piece by piece.

    All pieces joined equal the decode of all ids at once.  A character whose bytes are spread over
    several tokens is released with its last byte; until then nothing of it is, not even U+FFFD.

    Args:
        tokenizer: decodes; a byte-level vocabulary may cut characters anywhere.
        skip_special_tokens: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Decoders may treat the first token apart (a leading blank), so pending ids are decoded
        # behind the tokens of the last release and the context's own text is taken off again.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._released = 0  # characters of decode(context + pending) that have left

    def push(self, token_id: int) -> str:
        """Takes the next id and returns the text that has become certain, often empty."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        # Appending bytes can change how the last character reads, and only that one: an unfinished
        # character decodes to one U+FFFD at the end.
        certain = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._released : certain]
        self._released = max(certain, self._released)
        if certain == len(text):
            self._start_from(self._pending)
        elif len(self._pending) > _MAX_PENDING:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """Returns what is still held back; an unfinished character comes out as U+FFFD."""
        text = self._decode(self._context + self._pending)
        piece = text[self._released :]
        self._start_from(self._pending)
        return piece

    def _start_from(self, context: list[int]) -> None:
        self._context = context
        self._pending = []
        self._released = len(self._decode(context))

    def _shorten(self, text: str) -> None:
        head, tail = self._context + self._pending[:-_KEPT], self._pending[-_KEPT:]
        head_text, tail_text = self._decode(head), self._decode(tail)
        # Four characters of tail hold every byte that may still be unfinished (at most three).
        if len(tail_text) >= 4 and head_text + tail_text == text:
            self._context, self._pending = [], tail
            self._released -= len(head_text)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
