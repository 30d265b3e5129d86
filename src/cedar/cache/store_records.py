"""What goes into a prefix store and what comes out: records, hits, reports, counters. No files.

Called by the two stores and by whoever uses them.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cedar.cache.store_format import RecordInfo, RecordKind
from cedar.errors import UsageError

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record to store.

    Attributes:
        key: chain key of the tokens up to the end of the record.
        parent: chain key of the tokens before it.
        start: tokens before it; 0 = it continues no record.
        tokens: tokens of the record.
        payload: raw bytes.
        depth: bounded replays the rows descend from.
        kind: rows of one block, or the windows at one position.
    """

    key: bytes
    parent: bytes
    start: int
    tokens: int
    payload: Bytes
    depth: int = 0
    kind: RecordKind = RecordKind.GLOBAL


@dataclass(frozen=True, slots=True)
class Hit:
    """A record that was read and is whole."""

    info: RecordInfo
    payload: memoryview


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading every record of a store found.

    Attributes:
        checked: records read.
        payload_bytes: of the records that are whole.
        damaged: records that are not, and why.
        index_problem: what is wrong with the index itself; None = nothing.
    """

    checked: int
    payload_bytes: int
    damaged: tuple[tuple[RecordInfo, str], ...]
    index_problem: str | None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and self.index_problem is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Sizes of a store and what happened.

    Attributes:
        directory: where it is.
        limit_bytes: the most all its files may take; None when read by another process.
        bytes_on_disk: what they take.
        slot_bytes: size of a slot.
        slots: slots the limit allows; None when read by another process.
        slots_used: slots that hold records.
        records, records_set_aside: good ones, and bad ones that wait for their space to be needed.
        counts: `stored_records`, `stored_bytes`, `loaded_records`, `loaded_bytes` (payloads),
            `evicted`, and per reason `miss.*`, `dropped.*`, `set_aside.*`, `error.*`.
    """

    directory: str
    limit_bytes: int | None
    bytes_on_disk: int
    slot_bytes: int
    slots: int | None
    slots_used: int
    records: int
    records_set_aside: int
    counts: Mapping[str, int]

    def reasons(self, group: str) -> dict[str, int]:
        """Counts of one group by reason: "miss", "dropped", "set_aside" or "error"."""
        start = f"{group}."
        return {k.removeprefix(start): n for k, n in self.counts.items() if k.startswith(start)}


class Counters:
    """Counts by name, from several threads; remembers which part was not written to disk yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += count

    def fail(self, error: OSError | sqlite3.Error) -> None:
        """Count a failed system call or index statement under its short name."""
        if isinstance(error, OSError):
            name = errno.errorcode.get(error.errno or 0, "OSError")
        else:
            name = getattr(error, "sqlite_errorname", type(error).__name__)
        self.add(f"error.{name}")

    def all(self) -> dict[str, int]:
        """Everything counted."""
        with self._lock:
            return {name: count for name, count in self._counts.items() if count}

    def unwritten(self) -> dict[str, int]:
        """What was counted since `mark_written`."""
        with self._lock:
            return dict(self._counts - self._written)

    def mark_written(self, counts: Mapping[str, int]) -> None:
        """These counts are on disk now."""
        with self._lock:
            self._written.update(counts)


def check_buffers(keys: Sequence[bytes], into: Sequence[Bytes] | None) -> None:
    """Refuse a list of buffers that does not go with the keys.

    Raises:
        UsageError: there are more or fewer buffers than keys.
    """
    if into is not None and len(into) != len(keys):
        raise UsageError(f"{len(keys)} keys need as many buffers, {len(into)} were given")


def as_bytes(buffer: Bytes) -> memoryview:
    """A buffer as one run of bytes."""
    return memoryview(buffer).cast("B")
