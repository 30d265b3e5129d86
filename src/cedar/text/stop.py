"""Stop strings in streamed text.

Lives here: finding the first stop string of one sequence though it may be spread over pieces,
without ever releasing a part of it.  Does not live here: stop token ids, which the engine checks
itself. Called on the text that :mod:`cedar.text.detokenizer` releases.
"""

from __future__ import annotations

from collections.abc import Sequence

from cedar.errors import RequestError


class StopStrings:
    """Watches a stream of text for stop strings.

    The match is the stop string that is complete first; of several that end at the same character,
    the longest.  This does not depend on how the text is cut into pieces.

    Args:
        stops: the stop strings; none means that all text passes.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        for stop in stops:
            if not stop:
                raise RequestError(
                    "a stop string is empty; it would end every answer at once. Leave it out.",
                    param="stop",
                )
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece.

        Returns:
            The text that may leave now, and the stop string once one has been found.  The text ends
            before the stop string.  After a match no more text leaves.
        """
        if not self._stops:
            return text, None
        if self._matched is not None:
            return "", self._matched
        seen = self._held + text
        found = [
            (seen.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in seen
        ]
        if found:
            end, negative_length, self._matched = min(found)
            self._held = ""
            return seen[: end + negative_length], self._matched
        keep = self._length_to_hold(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def finish(self) -> str:
        """Returns the text still held back when the sequence ends: it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, seen: str) -> int:
        """Returns the length of the longest end of ``seen`` that begins some stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(seen)), 0, -1):
            end = seen[len(seen) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
