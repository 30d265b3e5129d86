"""`Batch`: what one engine step runs, as an explicit object from the scheduler to the runner."""

from __future__ import annotations

from dataclasses import dataclass

from cedar.engine.request import Request


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens `start .. start + count - 1` of one request; `is_last` ends the prompt."""

    request: Request
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk reaches the end of the prompt."""
        return self.start + self.count == len(self.request.prompt_ids)


@dataclass(frozen=True)
class Batch:
    """Work of one step.

    Attributes:
        prefills: chunks to read, oldest request first.
        decodes: requests that feed one token each.
        preempted: requests that lost their blocks to make room.
    """

    prefills: tuple[PrefillChunk, ...]
    decodes: tuple[Request, ...]
    preempted: tuple[Request, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.prefills and not self.decodes
