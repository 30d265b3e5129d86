"""`Spans`: which tokens of which sequences the rows of a call are; plain arithmetic and index tensors.

Rows of all sequences of a call are concatenated. Layers, row stores and the phase arithmetic speak
in spans; nothing here knows what a row holds.

    sequence 0: positions start .. start + count - 1 | sequence 1: ... | ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """Contiguous positions of several sequences, concatenated.

    Attributes:
        sequences: slot of each sequence in the state.
        starts: first position of each sequence, absolute.
        counts: rows of each sequence, at least 1.
    """

    sequences: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all sequences together."""
        return sum(self.counts)

    @cached_property
    def one_each(self) -> bool:
        """Whether every sequence has one row."""
        return self.num_rows == len(self.sequences)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last position of each sequence."""
        return tuple(s + c for s, c in zip(self.starts, self.counts, strict=True))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Row number of the first row of each sequence."""
        offsets, total = [], 0
        for count in self.counts:
            offsets.append(total)
            total += count
        return tuple(offsets)

    @cached_property
    def positions(self) -> Tensor:
        """Absolute position of every row, int64 `[N]`."""
        if self.one_each:
            return torch.tensor(self.starts)
        return torch.cat(
            [torch.arange(s, s + c) for s, c in zip(self.starts, self.counts, strict=True)]
        )

    @cached_property
    def row_sequences(self) -> Tensor:
        """State slot of every row, int32 `[N]`."""
        if self.one_each:
            return torch.tensor(self.sequences, dtype=torch.int32)
        # Not repeat_interleave: it wakes all of torch's threads, which then spin beside the kernels.
        return torch.cat(
            [
                torch.full((count,), slot, dtype=torch.int32)
                for slot, count in zip(self.sequences, self.counts, strict=True)
            ]
        )

    def tail(self, count: int) -> Spans:
        """The last `count` rows of each sequence (all of a shorter one)."""
        counts = tuple(min(count, c) for c in self.counts)
        starts = tuple(end - c for end, c in zip(self.ends, counts, strict=True))
        return Spans(self.sequences, starts, counts)

    def rows_of(self, narrower: Spans) -> Tensor | None:
        """Row numbers here of the rows of narrower spans over the same sequences; None if equal."""
        if narrower is self or narrower == self:
            return None
        parts = []
        for offset, start, at, count in zip(
            self.offsets, self.starts, narrower.starts, narrower.counts, strict=True
        ):
            first = offset + at - start
            parts.append(torch.arange(first, first + count))
        return torch.cat(parts)
