"""`PrefixReader`: reads a prefix store without being its writer. It changes nothing in it.

Sees committed records while another process writes. Nothing keeps the writer from reusing slots
under a read: every record is checked after reading, and looked up again if the check fails. Called
by `store.py` (verify), `cedar cache`, and servers that share a store.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from cedar.cache.store_files import INDEX_NAME, FileSystem, directory_bytes, find_slab
from cedar.cache.store_format import SLOT_ALIGNMENT, RecordInfo, RecordKind
from cedar.cache.store_index import connect_read_only, find_row, read_counters, read_rows
from cedar.cache.store_records import (
    Bytes,
    Counters,
    Hit,
    StoreStats,
    VerifyReport,
    as_bytes,
    check_buffers,
)
from cedar.cache.store_slab import Slab
from cedar.errors import StoreError

#: Looking a record up again after a failed check; a writer would have to move it each time.
_TRIES = 3


class PrefixReader:
    """A store opened for reading.

    Args:
        directory: of the store.
        root: records of other roots are never returned; None = any.
        files: system calls.

    Raises:
        StoreError: there is no store, or its index cannot be read.
    """

    def __init__(
        self, directory: str | Path, root: bytes | None = None, files: FileSystem | None = None
    ) -> None:
        self.directory, self.root = Path(directory), root
        self._files, self._counters = files or FileSystem(), Counters()
        self._lock = threading.Lock()
        self._bad: set[RecordInfo] = set()
        self._slab: Slab | None = None
        index = self.directory / INDEX_NAME
        if not index.is_file():
            raise StoreError(f"{self.directory} is not a prefix store: it has no {INDEX_NAME}")
        try:
            self._db = connect_read_only(index)
            self._inode = index.stat().st_ino
            self._open_slab()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the index of prefix store {self.directory} cannot be read: {error}; a writer "
                f"rebuilds it when it opens the store, e.g. cedar cache gc {self.directory}"
            ) from error

    def __enter__(self) -> PrefixReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._db.close()
        if self._slab is not None:
            self._slab.close()

    def contains_many(
        self, keys: Sequence[bytes], *, kind: RecordKind = RecordKind.GLOBAL,
        max_depth: int | None = None,
    ) -> list[bool]:  # fmt: skip
        """As `PrefixStore.contains_many`."""
        found = [self._find(key, kind, max_depth) for key in keys]
        return [isinstance(info, RecordInfo) for info in found]

    def get_many(
        self, keys: Sequence[bytes], into: Sequence[Bytes] | None = None, *,
        kind: RecordKind = RecordKind.GLOBAL, max_depth: int | None = None,
    ) -> list[Hit | None]:  # fmt: skip
        """As `PrefixStore.get_many`; a bad record is remembered here and stays in the store."""
        check_buffers(keys, into)
        found = [self._find(key, kind, max_depth) for key in keys]
        for info in found:
            if isinstance(info, RecordInfo) and self._slab is not None:
                with contextlib.suppress(OSError):
                    self._slab.will_need(info)
        return [
            self._read(info, None if into is None else into[i], max_depth)
            for i, info in enumerate(found)
        ]

    def ls(self) -> list[RecordInfo]:
        """All records, least recently used first.

        Raises:
            StoreError: the index is damaged.
        """
        try:
            with self._lock:
                rows = list(read_rows(self._db, self._slot_bytes))
        except sqlite3.Error as error:
            raise StoreError(f"the index of {self.directory} cannot be read: {error}") from error
        return [row for row in rows if isinstance(row, RecordInfo)]

    def verify(self) -> VerifyReport:
        """Read and check every record and the index."""
        damaged: list[tuple[RecordInfo, str]] = []
        checked = payload_bytes = 0
        rows, index_problem = self._check_index()
        for info in rows:
            problem = info.problem or self._check(info)
            checked += 1
            if problem is None:
                payload_bytes += info.payload_bytes
            elif info.problem is not None or self._row(info) == info:
                damaged.append((info, problem))
        return VerifyReport(checked, payload_bytes, tuple(damaged), index_problem)

    def stats(self) -> StoreStats:
        """Sizes now; counts are those the writers have written since the store was made.

        Raises:
            StoreError: the index is damaged.
        """
        infos = self.ls()
        with self._lock:
            counts = read_counters(self._db)
        for name, count in self._counters.all().items():
            counts[name] = counts.get(name, 0) + count
        bad = sum(info.problem is not None for info in infos)
        return StoreStats(
            directory=str(self.directory),
            limit_bytes=None,
            bytes_on_disk=directory_bytes(self.directory),
            slot_bytes=self._slot_bytes,
            slots=None,
            slots_used=sum(len(info.slots) for info in infos),
            records=len(infos) - bad,
            records_set_aside=bad,
            counts=counts,
        )

    def _check_index(self) -> tuple[list[RecordInfo], str | None]:
        try:
            with self._lock:
                verdict = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
                rows = list(read_rows(self._db, self._slot_bytes))
        except sqlite3.Error as error:
            return [], str(error)
        infos = [row for row in rows if isinstance(row, RecordInfo)]
        if verdict != "ok":
            return infos, str(verdict)
        lost = len(rows) - len(infos)
        return infos, f"{lost} rows make no sense" if lost else None

    def _check(self, info: RecordInfo) -> str | None:
        if self._slab is None:
            return "truncated"
        return self._slab.read(info, memoryview(bytearray(info.payload_bytes)))

    def _row(self, info: RecordInfo) -> RecordInfo | None:
        """The row of a record as it is now, order of use left as it was in `info`."""
        try:
            with self._lock:
                self._follow()
                row = find_row(self._db, info.ident, self._slot_bytes)
        except (OSError, sqlite3.Error):
            return None
        return None if row is None else row.at(info.used)

    def _find(self, key: bytes, kind: RecordKind, max_depth: int | None) -> RecordInfo | str:
        """The record to read, or the reason of the miss."""
        try:
            with self._lock:
                self._follow()
                info = find_row(self._db, (kind, key), self._slot_bytes)
        except OSError as error:
            self._counters.fail(error)
            return "io"
        except sqlite3.Error as error:
            self._counters.fail(error)
            return "index"
        if info is None:
            return "absent"
        if info.problem is not None or info.at(0) in self._bad:
            return "set_aside"
        if self.root is not None and info.root != self.root:
            return "foreign"
        if max_depth is not None and info.depth > max_depth:
            return "depth"
        return info

    def _read(
        self, found: RecordInfo | str, buffer: Bytes | None, max_depth: int | None
    ) -> Hit | None:
        problem: str | None = "truncated"
        for _ in range(_TRIES):
            if isinstance(found, str):
                problem = found
                break
            payload = as_bytes(bytearray(found.payload_bytes) if buffer is None else buffer)
            if len(payload) != found.payload_bytes:
                problem = "size"
                break
            problem = self._slab.read(found, payload) if self._slab else "truncated"
            if problem is None:
                self._counters.add("loaded_records")
                self._counters.add("loaded_bytes", found.payload_bytes)
                return Hit(found, payload)
            again = self._find(found.key, found.kind, max_depth)
            if isinstance(again, RecordInfo) and again.at(0) == found.at(0):
                if problem != "io":
                    self._bad.add(found.at(0))
                break
            found, problem = again, "evicted"
        self._counters.add(f"miss.{problem}")
        return None

    @property
    def _slot_bytes(self) -> int:
        return SLOT_ALIGNMENT if self._slab is None else self._slab.slot_bytes

    def _open_slab(self) -> None:
        found = find_slab(self.directory)
        if found is not None:
            self._slab = Slab(found[0], found[1], self._files, writable=False)

    def _follow(self) -> None:
        """Open the index again after a writer has replaced it, the slab once there is one."""
        index = self.directory / INDEX_NAME
        inode = index.stat().st_ino
        if inode != self._inode:
            db = connect_read_only(index)
            self._db.close()
            self._db, self._inode = db, inode
        if self._slab is None:
            self._open_slab()
