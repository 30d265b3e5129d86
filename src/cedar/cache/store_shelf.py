"""The writer's files as one thing: slab, index and their picture in memory, kept in step.

Order of every write: record bytes, sync, row. Order of every removal: row, then the slots are free.
What may be stored, counters and the public calls are in `store.py`, the only caller.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cedar.cache.store_files import (
    INDEX_NAME,
    LOCK_NAME,
    FileSystem,
    directory_bytes,
    find_slab,
    slab_name,
)
from cedar.cache.store_format import RecordInfo, slot_bytes_for
from cedar.cache.store_index import PAGE_BYTES, Ident, StoreIndex, is_damage
from cedar.cache.store_slab import Slab
from cedar.cache.store_space import Budget, Entry, Space

_INDEX_FILES = (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm")


class Shelf:
    """Opened files of the writer.

    All methods but `close` may raise OSError or sqlite3.Error and may leave the shelf `stale` until
    `reload`. `lock` guards `space`; whatever changes files is called by one thread at a time.

    Args:
        directory: of the store, locked by this process.
        files: system calls.
        limit_bytes: for all files together.
        record_bytes: payload of a usual record, for the slot size of a new store.

    Attributes:
        space: records and slots in memory.
        lock: guards `space`.
        stale: something failed; `space` may not match the index.
    """

    def __init__(
        self, directory: Path, files: FileSystem, limit_bytes: int, record_bytes: int
    ) -> None:
        found = find_slab(directory)
        path, size = found or (None, slot_bytes_for(record_bytes))
        self.slot_bytes, self._files = size, files
        self._index_path = directory / INDEX_NAME
        name = slab_name(size)
        others = directory_bytes(directory, leave_out=(name, LOCK_NAME, *_INDEX_FILES))
        self.budget = Budget.of(limit_bytes, size, others)
        self.lock = threading.Lock()
        self.stale = True
        self._set_aside: Counter[str] = Counter()
        self.space = Space(self.budget.slots, 0)
        self._index: StoreIndex | None = None
        self.slab = Slab(path or directory / name, size, files, writable=True)
        try:
            self.reload()
            if self.space.num_slots > self.budget.slots:
                self.shrink(self.budget.slots, must=True)
            if self._index_path.stat().st_size > self.budget.index_pages * PAGE_BYTES:
                self.rewrite_index()
        except BaseException:
            self.close()
            raise

    def reload(self) -> None:
        """Open the index again and take its rows for the truth; rebuild it if it is damaged."""
        self._close_index()
        try:
            rows = self._read_index()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            rows = None
        if rows is None:
            rows = _without_copies(self.slab.scan())
            self._replace_index(rows, {})
            self._set_aside["index"] += bool(self.slab.num_slots)
        space = Space(self.budget.slots, self.slab.num_slots)
        refused = space.adopt(rows)
        with self.lock:
            self.space = space
        self.stale = False
        self._delete([info.ident for info, _ in refused])
        self._set_aside.update(problem for _, problem in refused)

    def rewrite_index(self) -> None:
        """Write the index anew, without the free pages that removals leave."""
        with self.lock:
            infos = [replace(e.info, used=e.used, problem=e.problem) for e in self.space]
        self._replace_index(infos, self._guard().counters())

    def write(self, batch: Sequence[tuple[RecordInfo, memoryview]]) -> None:
        """Store records in slots that were taken for them; visible once this returns."""
        try:
            for info, payload in batch:
                self.slab.write(info, payload)
            self.slab.sync()
        except OSError:
            with self.lock:
                for info, _ in batch:
                    self.space.free(info.slots)
            raise
        self._change(insert=[info for info, _ in batch])
        with self.lock:
            for info, _ in batch:
                self.space.add(info)

    def evict(self, victims: Sequence[Entry]) -> None:
        """Remove records; their slots are free once the rows are gone and nobody reads them."""
        with self.lock:
            for entry in victims:
                entry.readers += 1  # keeps the slots out of use until the rows are gone
                self.space.remove(entry.info.ident)
            space = self.space
        self._delete([entry.info.ident for entry in victims])
        with self.lock:
            for entry in victims:
                space.unpin(entry)

    def grow(self, num_slots: int) -> None:
        """Claim disk space up to this many slots."""
        if num_slots > self.space.num_slots:
            self.slab.resize(num_slots)
            with self.lock:
                self.space.resize(num_slots)

    def shrink(self, num_slots: int, *, must: bool) -> None:
        """Cut the slab to this many slots: evict what is too much, move what lies behind.

        Args:
            num_slots: slots to keep.
            must: evict what cannot be moved, which only records of several slots can suffer; if
                false, the slab stays longer instead.
        """
        with self.lock:
            excess = self.space.slots_used - num_slots
            victims = self.space.victims(excess, set()) if excess > 0 else []
        self.evict(victims)
        while True:
            with self.lock:
                behind = [e for e in self.space if max(e.info.slots) >= num_slots]
                movable = self._movable(behind, num_slots)
            if not movable:
                break
            self._move(movable)
        if must:
            self.evict(behind)
        with self.lock:
            # Slots that are still being read stay, moved or not.
            end = max(self.space.end_of_used(), min(num_slots, self.space.num_slots))
        self.slab.resize(end)
        with self.lock:
            self.space.resize(end)

    def take_set_aside(self) -> Counter[str]:
        """Records that were dropped while opening, reloading or moving since the last call."""
        taken, self._set_aside = self._set_aside, Counter()
        return taken

    def note(self, used: Mapping[Ident, int], problems: Mapping[Ident, str]) -> None:
        """Store the order of use and the problems of records."""
        for step in _steps(list(used), self.rows_per_batch):
            self._guard().note({ident: used[ident] for ident in step}, {})
        for step in _steps(list(problems), self.rows_per_batch):
            self._guard().note({}, {ident: problems[ident] for ident in step})

    def add_counters(self, counts: Mapping[str, int]) -> None:
        """Add to the counters that outlive the process."""
        self._guard().add_counters(counts)

    def close(self) -> None:
        """Close all files."""
        self._close_index()
        self.slab.close()

    def _movable(self, behind: Sequence[Entry], num_slots: int) -> list[Entry]:
        """Records that fit the free slots in front, as many as one write may have."""
        room = self.space.num_free_below(num_slots)
        chosen: list[Entry] = []
        for entry in behind:
            if len(chosen) == self.rows_per_batch:
                break
            if not entry.readers and len(entry.info.slots) <= room:
                room -= len(entry.info.slots)
                chosen.append(entry)
        return chosen

    def _move(self, entries: Sequence[Entry]) -> None:
        """Copy records to the lowest free slots."""
        batch: list[tuple[Entry, RecordInfo, memoryview]] = []
        bad = []
        for entry in entries:
            payload = memoryview(bytearray(entry.info.payload_bytes))
            problem = self.slab.read(entry.info, payload)
            if problem is not None:
                self._set_aside[problem] += 1
                bad.append(entry)
                continue
            with self.lock:
                slots = self.space.take(len(entry.info.slots))
            batch.append((entry, replace(entry.info, slots=slots, used=entry.used), payload))
        self.evict(bad)
        try:
            for _, info, payload in batch:
                self.slab.write(info, payload)
            self.slab.sync()
            self._change(insert=[info for _, info, _ in batch])
        except OSError:
            self.stale = True  # the slots that were taken are in nobody's hands
            raise
        with self.lock:
            for entry, info, _ in batch:
                self.space.move(entry, info)

    def _read_index(self) -> list[RecordInfo] | None:
        """Rows that make sense; the others are deleted. None if the index is new or unfinished."""
        index = self._open_index()
        if not index.complete:
            return None
        rows = list(index.load(self.slot_bytes))
        senseless = [row for row in rows if not isinstance(row, RecordInfo)]
        self._delete(senseless)
        self._set_aside["damaged"] += len(senseless)
        return [row for row in rows if isinstance(row, RecordInfo)]

    def _delete(self, idents: Sequence[Ident]) -> None:
        for step in _steps(idents, self.rows_per_batch):
            self._change(delete=step)

    def _change(self, delete: Sequence[Ident] = (), insert: Sequence[RecordInfo] = ()) -> None:
        try:
            self._guard().change(delete, insert)
        except (OSError, sqlite3.Error):
            self.stale = True
            raise

    @property
    def rows_per_batch(self) -> int:
        """Records that one call of `write` may store."""
        return self._guard().rows_per_change

    def _guard(self) -> StoreIndex:
        if self._index is None:
            raise sqlite3.OperationalError("the index is closed")
        return self._index

    def _replace_index(self, infos: Sequence[RecordInfo], counters: Mapping[str, int]) -> None:
        """Make a new index; if that is interrupted, the next opening rebuilds it."""
        self._close_index()
        self.stale = True
        for name in _INDEX_FILES:
            self._files.unlink(self._index_path.with_name(name))
        index = self._open_index()
        for start in range(0, len(infos), index.rows_per_change):
            index.change(insert=infos[start : start + index.rows_per_change])
        index.add_counters(counters)
        index.finish()
        self.stale = False

    def _open_index(self) -> StoreIndex:
        self._index = StoreIndex(
            self._index_path, self._files, max_pages=self.budget.index_pages,
            log_bytes=self.budget.log_bytes,
        )  # fmt: skip
        return self._index

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


def _without_copies(infos: Iterable[RecordInfo]) -> list[RecordInfo]:
    """One record of each name, that of the smallest depth: a slab also keeps what was replaced."""
    best: dict[Ident, RecordInfo] = {}
    for info in infos:
        if info.ident not in best or info.depth < best[info.ident].depth:
            best[info.ident] = info
    return list(best.values())


def _steps(items: Sequence[Ident], size: int) -> Iterator[Sequence[Ident]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
