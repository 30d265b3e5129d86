"""Windows of sequences that have run, in memory: what a hit needs besides global rows to go on.

    key of a block end  ->  replay depth, window rings, boundary rows

Beside the block pool and bounded on its own: global rows are found by the same keys there, so windows
whose blocks are gone are never asked for and leave as the least recently used. Filled and asked by
`engine/prefix_reuse.py`; their bytes are made and taken back by `transfer.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cedar.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """State of one sequence at a block end, without its global rows.

    Attributes:
        rings: window rows of the leading layers, see `transfer.window_payload`.
        stream, pre: boundary rows that end there, `[k, C, D]`, `[k, C]`; None = none. With them the
            decoder's replay may begin before the block end.
    """

    rings: bytes
    stream: Tensor | None = None
    pre: Tensor | None = None

    @property
    def boundary_rows(self) -> int:
        """How many tokens before the block end have their boundary row here."""
        return 0 if self.stream is None else self.stream.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.rings) + sum(t.nbytes for t in (self.stream, self.pre) if t is not None)


class WindowCache:
    """The most recently used windows.

    Args:
        capacity: how many are kept.

    Attributes:
        nbytes: bytes of those kept; any thread may read it.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise UsageError(f"capacity={capacity} must be at least 1")
        self.capacity, self.nbytes = capacity, 0
        self._kept: OrderedDict[bytes, tuple[int, Windows]] = OrderedDict()  # next victim first

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: bytes, depth: int, windows: Windows) -> None:
        """Keep windows, unless better ones are there: of a smaller depth, then of more boundary rows.

        Args:
            key: chain key of the block they are at the end of.
            depth: bounded replays they descend from.
        """
        known = self._kept.pop(key, None)
        if known is not None:
            self.nbytes -= known[1].nbytes
            if (known[0], -known[1].boundary_rows) < (depth, -windows.boundary_rows):
                depth, windows = known
        self._kept[key] = depth, windows
        self.nbytes += windows.nbytes
        while len(self._kept) > self.capacity:
            _, (_, victim) = self._kept.popitem(last=False)
            self.nbytes -= victim.nbytes

    def get(self, key: bytes, max_depth: int | None = None) -> tuple[int, Windows] | None:
        """Replay depth and windows at the end of a block, or None. Does not count as a use.

        Args:
            max_depth: greatest replay depth that is of use; None = any.
        """
        found = self._kept.get(key)
        return None if found is None or (max_depth is not None and found[0] > max_depth) else found

    def touch(self, key: bytes) -> None:
        """Count a use of windows that are there."""
        self._kept.move_to_end(key)

    def forget_all(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self.nbytes = 0
