"""`PrefixStore`: prefixes on disk. The writer's end: store, look up, read, evict; never wrong.

Whatever goes wrong with the disk, a lookup says miss and a record is dropped and counted; only
opening and a caller's own mistakes raise. Promises and caveats: docs/prefix-cache.md. Reading in
another process: `store_reader.py`. Imports no torch. Called by `transfer.py` and `cedar cache`.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from cedar.cache.store_files import FileSystem, directory_bytes, prepare_directory, take_lock
from cedar.cache.store_format import RecordInfo, RecordKind, check_names, slots_for
from cedar.cache.store_get import Lookup
from cedar.cache.store_index import Ident
from cedar.cache.store_put import PutResult, leading_batch, put_batch
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_records import (
    Bytes,
    Counters,
    Hit,
    Record,
    StoreStats,
    VerifyReport,
    as_bytes,
)
from cedar.cache.store_shelf import Shelf
from cedar.cache.store_space import Budget
from cedar.errors import StoreError

#: The order of use is advice; a crash may forget this much of it.
_NOTE_SECONDS = 30.0


class PrefixStore:
    """The one writer of a store directory.

    Lookups and reads may come from any thread and never wait until a write is on the disk; writing
    calls wait for each other.

    Args:
        directory: new, empty, or a store; gets mode 0700.
        root: `Fingerprint.root()`; records of other roots are never returned.
        limit_bytes: all files of the directory together stay below it.
        record_bytes: payload of one block, for the slot size of a new store.
        files: system calls.

    Raises:
        StoreError: another process writes there, it is no store, or it cannot be opened or written.
    """

    def __init__(
        self, directory: str | Path, *, root: bytes, limit_bytes: int, record_bytes: int,
        files: FileSystem | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.root, self.limit_bytes = Path(directory), root, limit_bytes
        check_names(root, root, root)
        prepare_directory(self.directory)
        self._lock_fd = take_lock(self.directory)
        try:
            self._shelf = Shelf(self.directory, files or FileSystem(), limit_bytes, record_bytes)
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock_fd)
            raise StoreError(f"prefix store {self.directory} cannot be opened: {error}") from error
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._writing = threading.Lock()
        self._counters = Counters()
        self._lookup = Lookup(self._shelf, root, self._counters)
        self._noted = time.monotonic()
        self._attempt(lambda: None)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    @property
    def slot_bytes(self) -> int:
        """Bytes on disk of one slot; a record takes whole slots."""
        return self._shelf.slot_bytes

    def contains_many(
        self, keys: Sequence[bytes], *, kind: RecordKind = RecordKind.GLOBAL,
        max_depth: int | None = None,
    ) -> list[bool]:  # fmt: skip
        """Which records a `get_many` would try to read.

        Args:
            keys: chain keys.
            kind: of the records.
            max_depth: greatest replay depth that is of use; None = any.
        """
        return self._lookup.contains_many(keys, kind, max_depth)

    def get_many(
        self, keys: Sequence[bytes], into: Sequence[Bytes] | None = None, *,
        kind: RecordKind = RecordKind.GLOBAL, max_depth: int | None = None,
    ) -> list[Hit | None]:  # fmt: skip
        """Read records; one that is not exactly what was stored is None and is set aside.

        Args:
            keys: chain keys, in sequence order.
            into: writable buffers of exactly the payloads' sizes, one a key; None = new ones. A
                buffer holds anything if its result is None.
            kind: of the records.
            max_depth: greatest replay depth that is of use; None = any.
        """
        return self._lookup.get_many(keys, into, kind, max_depth)

    def put_many(self, records: Sequence[Record]) -> int:
        """Store records durably; parents before the records that continue them.

        A record is left out and counted if it is stored already with the same or a smaller depth,
        its parent is not stored, there is no room that may be taken, or the disk fails.

        Returns:
            How many were stored by this call.

        Raises:
            UsageError: a name has the wrong length, or a payload is too large for any store.
        """
        for record in records:
            check_names(self.root, record.key, record.parent)
            slots_for(len(as_bytes(record.payload)), self.slot_bytes)
        result = PutResult()
        rest = list(records)
        with self._writing:
            written: set[Ident] = set()
            try:
                while rest:
                    self._make_ready()
                    batch = leading_batch(rest, self._shelf.rows_per_batch)
                    put_batch(self._shelf, self.root, batch, written, result)
                    del rest[: len(batch)]
            except (OSError, sqlite3.Error) as error:
                self._counters.fail(error)
                result.dropped["error"] += len(rest)
            self._count(result)
            if time.monotonic() - self._noted > _NOTE_SECONDS:
                self._note()
        return result.stored

    def touch(self, keys: Sequence[bytes], kind: RecordKind = RecordKind.GLOBAL) -> None:
        """Count a use of records whose rows were found elsewhere; keys in sequence order."""
        self._lookup.touch(keys, kind)

    def delete(self, keys: Sequence[bytes], kind: RecordKind = RecordKind.GLOBAL) -> int:
        """Remove records; returns how many. Their bytes stay in the slab until overwritten."""
        with self._writing:
            with self._shelf.lock:
                found = [self._shelf.space.find((kind, key)) for key in keys]
            entries = [entry for entry in found if entry is not None]
            return len(entries) if self._attempt(lambda: self._shelf.evict(entries)) else 0

    def gc(self, limit_bytes: int | None = None) -> int:
        """Remove what no lookup can return, cut the slab to what is left, write the index anew.

        Args:
            limit_bytes: also evict until all files fit; None = remove only what is useless.

        Returns:
            How many records were removed.

        Raises:
            StoreError: not one record fits `limit_bytes`.
        """

        def collect() -> None:
            with self._shelf.lock:
                useless = self._shelf.space.unreachable()
            self._shelf.evict(useless)
            slots = min(budget.slots, self._shelf.space.slots_used)
            self._shelf.shrink(slots, must=limit_bytes is not None)
            self._shelf.rewrite_index()

        budget = self._shelf.budget
        if limit_bytes is not None:
            budget = Budget.of(limit_bytes, self.slot_bytes)
        self.flush()
        with self._writing:
            before = len(self._shelf.space)
            self._attempt(collect)
            return before - len(self._shelf.space)

    def ls(self) -> list[RecordInfo]:
        """All records, least recently used first."""
        with self._shelf.lock:
            return [replace(e.info, used=e.used, problem=e.problem) for e in self._shelf.space]

    def verify(self) -> VerifyReport:
        """Read and check every record; what is bad is set aside."""
        self.flush()
        with PrefixReader(self.directory) as reader:
            report = reader.verify()
        self._lookup.blame([(info, why) for info, why in report.damaged if why != "io"])
        return report

    def stats(self) -> StoreStats:
        """Sizes now, and what happened since opening."""
        bytes_on_disk = directory_bytes(self.directory)
        with self._shelf.lock:
            space = self._shelf.space
            return StoreStats(
                directory=str(self.directory),
                limit_bytes=self.limit_bytes,
                bytes_on_disk=bytes_on_disk,
                slot_bytes=self.slot_bytes,
                slots=space.capacity,
                slots_used=space.slots_used,
                records=len(space) - space.num_set_aside,
                records_set_aside=space.num_set_aside,
                counts=self._counters.all(),
            )

    def flush(self) -> None:
        """Write the order of use, what was set aside and the counters; `close` does it too."""
        with self._writing:
            self._note()

    def close(self) -> None:
        """Flush and close; later calls miss and drop."""
        with self._writing:
            if self._lookup.closed:
                return
            self._note()
            with self._shelf.lock:
                self._lookup.closed = True
            self._shelf.close()
            os.close(self._lock_fd)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether an action on the files succeeded; a failure is counted."""
        try:
            self._make_ready()
            action()
        except (OSError, sqlite3.Error) as error:
            self._counters.fail(error)
            return False
        return True

    def _make_ready(self) -> None:
        """Recover from an earlier failure of the index, if there was one."""
        if self._lookup.closed:
            raise OSError(errno.EBADF, "the prefix store is closed")
        if self._shelf.stale:
            self._shelf.reload()
        for problem, count in self._shelf.take_set_aside().items():
            self._counters.add(f"set_aside.{problem}", count)

    def _count(self, result: PutResult) -> None:
        self._counters.add("stored_records", result.stored)
        self._counters.add("stored_bytes", result.stored_bytes)
        self._counters.add("evicted", result.evicted)
        for reason, count in result.dropped.items():
            self._counters.add(f"dropped.{reason}", count)

    def _note(self) -> None:
        self._noted = time.monotonic()
        used, problems = self._lookup.notes()
        if not self._attempt(lambda: self._shelf.note(used, problems)):
            return
        self._lookup.noted(used, problems)
        counts = self._counters.unwritten()
        if self._attempt(lambda: self._shelf.add_counters(counts)):
            self._counters.mark_written(counts)
