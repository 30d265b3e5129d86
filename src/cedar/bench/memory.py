"""Peak memory of a piece of work: resident set above its start, sampled by a thread. Linux.

Used by `flows.py` and the scaling benchmark.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096
_INTERVAL_SECONDS = 0.005


def resident_bytes() -> int:
    """Resident set of this process; 0 where /proc is not there."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def give_back() -> None:
    """Return freed memory to the system, so that what is used next counts again; glibc only."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PeakMemory:
    """Context manager; `peak_bytes` is the most the resident set rose above its entry."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = 0

    def __enter__(self) -> PeakMemory:
        give_back()
        self._start = resident_bytes()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self.peak_bytes = max(self.peak_bytes, resident_bytes() - self._start)
