"""Splits a model's output into its reasoning and its answer while it streams.

Lives here: finding ``</think>``, or the tool-call block that ends reasoning without it, though it
may be spread over pieces.  Does not live here: the calls themselves
(:mod:`cedar.text.tool_calls`, which reads the answer that this module releases).  Called by the
server and the offline API on decoded text in which control tokens have been kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from cedar.text.deepseek_markers import CALLS_OPEN, THINK_CLOSE, THINK_OPEN


def partial_length(text: str, markers: Iterable[str]) -> int:
    """Returns the length of the longest end of ``text`` that begins a marker but is not all of it.

    That many characters must be held back, for the next piece may complete the marker.
    """
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class ReasoningSplitter:
    """Splits one output; what comes out does not depend on how the text is cut into pieces.

    Reasoning ends at the first ``</think>``, or in front of the first tool-call block, which
    belongs to the answer together with the blank line before it.  After that everything is answer.
    A ``<think>`` at the very start, with or without white space before it, opens reasoning (some
    prompts leave it to the model) and belongs to neither side.

    Args:
        starts_in_reasoning: whether the prompt ended with an open ``<think>``;
            :func:`cedar.text.chat_template.starts_in_reasoning` tells.
    """

    def __init__(self, starts_in_reasoning: bool) -> None:
        self._in_reasoning = starts_in_reasoning
        self._at_start = True
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece.

        Returns:
            What may leave now, of the reasoning and of the answer.
        """
        self._held += text
        if self._at_start and not self._pass_start():
            return "", ""
        if not self._in_reasoning:
            return "", self._take(len(self._held))
        end, length = self._find_end()
        if end < 0:
            held = partial_length(self._held, (THINK_CLOSE, CALLS_OPEN, "\n\n" + CALLS_OPEN))
            return self._take(len(self._held) - held), ""
        self._in_reasoning = False
        reasoning = self._take(end)
        self._take(length)
        return reasoning, self._take(len(self._held))

    def finish(self) -> tuple[str, str]:
        """Returns what is still held back when the output ends: it was no marker."""
        rest = self._take(len(self._held))
        return (rest, "") if self._in_reasoning else ("", rest)

    def _pass_start(self) -> bool:
        """Decides whether the output begins with ``<think>``; returns False while it may."""
        start = self._held.lstrip()
        if start.startswith(THINK_OPEN):
            self._in_reasoning = True
            self._held = start[len(THINK_OPEN) :]
        elif THINK_OPEN.startswith(start):
            return False
        self._at_start = False
        return True

    def _find_end(self) -> tuple[int, int]:
        """Returns where reasoning ends and the length of the marker to leave out; -1 if nowhere."""
        close, block = self._held.find(THINK_CLOSE), self._held.find(CALLS_OPEN)
        if block < 0 or 0 <= close < block:
            return close, len(THINK_CLOSE)
        return (block - 2 if self._held[:block].endswith("\n\n") else block), 0

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
