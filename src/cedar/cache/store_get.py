"""Looking up and reading in the writer's process, from any thread, beside the writing.

Records being read are pinned, so their slots are not reused before the read has ended. Called by
`store.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from cedar.cache.store_format import RecordInfo, RecordKind
from cedar.cache.store_index import Ident
from cedar.cache.store_records import Bytes, Counters, Hit, as_bytes, check_buffers
from cedar.cache.store_shelf import Shelf
from cedar.cache.store_space import Entry


class Lookup:
    """The reading half of a `PrefixStore`.

    Args:
        shelf: the files.   root: fingerprint of the records that may be returned.
        counters: where hits and misses are counted.

    Attributes:
        closed: everything is a miss from now on.
    """

    def __init__(self, shelf: Shelf, root: bytes, counters: Counters) -> None:
        self._shelf, self._root, self._counters = shelf, root, counters
        self._touched: set[Ident] = set()
        self._blamed: dict[Ident, Entry] = {}
        self.closed = False

    def contains_many(
        self, keys: Sequence[bytes], kind: RecordKind, max_depth: int | None
    ) -> list[bool]:
        """See `PrefixStore.contains_many`."""
        with self._shelf.lock:
            return [isinstance(self._find(key, kind, max_depth), Entry) for key in keys]

    def get_many(
        self, keys: Sequence[bytes], into: Sequence[Bytes] | None, kind: RecordKind,
        max_depth: int | None,
    ) -> list[Hit | None]:  # fmt: skip
        """See `PrefixStore.get_many`."""
        check_buffers(keys, into)
        with self._shelf.lock:
            space = self._shelf.space
            found = [self._find(key, kind, max_depth) for key in keys]
            pinned = [entry for entry in found if isinstance(entry, Entry)]
            for pin in pinned:
                pin.readers += 1
            infos = [entry.info if isinstance(entry, Entry) else None for entry in found]
        hits: list[Hit | None] = []
        try:
            for info in infos:
                if info is not None:
                    with contextlib.suppress(OSError):
                        self._shelf.slab.will_need(info)
            for i, (entry, info) in enumerate(zip(found, infos, strict=True)):
                if isinstance(entry, Entry) and info is not None:
                    hits.append(self._read(entry, info, None if into is None else into[i]))
                else:
                    self._counters.add(f"miss.{entry}")
                    hits.append(None)
        finally:
            with self._shelf.lock:
                for pin in pinned:
                    space.unpin(pin)
                self._touch(e for e, hit in zip(found, hits, strict=False) if hit is not None)
        return hits

    def touch(self, keys: Sequence[bytes], kind: RecordKind) -> None:
        """See `PrefixStore.touch`."""
        with self._shelf.lock:
            self._touch([self._find(key, kind, None) for key in keys])

    def blame(self, damaged: Sequence[tuple[RecordInfo, str]]) -> None:
        """Set aside what another reader of the same files found."""
        with self._shelf.lock:
            for info, problem in damaged:
                entry = self._shelf.space.find(info.ident)
                if entry is not None and entry.info.slots == info.slots:
                    self._set_aside(entry, problem)

    def notes(self) -> tuple[dict[Ident, int], dict[Ident, str]]:
        """Order of use and problems of records since `noted`."""
        with self._shelf.lock:
            entries = map(self._shelf.space.find, self._touched)
            used = {entry.info.ident: entry.used for entry in entries if entry is not None}
            problems = {
                ident: entry.problem
                for ident, entry in self._blamed.items()
                if entry.problem is not None and self._is_current(entry)
            }
            self._blamed = {ident: self._blamed[ident] for ident in problems}
            return used, problems

    def noted(self, used: Iterable[Ident], problems: Iterable[Ident]) -> None:
        """These are in the index now."""
        with self._shelf.lock:
            self._touched.difference_update(used)
            for ident in problems:
                self._blamed.pop(ident, None)

    def _find(self, key: bytes, kind: RecordKind, max_depth: int | None) -> Entry | str:
        """The record to read, or the reason of the miss."""
        if self.closed:
            return "closed"
        entry = self._shelf.space.find((kind, key))
        if entry is None:
            return "absent"
        if entry.problem is not None:
            return "set_aside"
        if entry.info.root != self._root:
            return "foreign"
        if max_depth is not None and entry.info.depth > max_depth:
            return "depth"
        return entry

    def _read(self, entry: Entry, info: RecordInfo, buffer: Bytes | None) -> Hit | None:
        payload = as_bytes(bytearray(info.payload_bytes) if buffer is None else buffer)
        if len(payload) != info.payload_bytes:
            self._counters.add("miss.size")
            return None
        problem = self._shelf.slab.read(info, payload)
        if problem is None:
            self._counters.add("loaded_records")
            self._counters.add("loaded_bytes", info.payload_bytes)
            return Hit(info, payload)
        self._counters.add(f"miss.{problem}")
        with self._shelf.lock:
            # Not to blame: a record that moved or left meanwhile, and a disk that fails just now.
            if entry.info is info and self._is_current(entry) and problem != "io":
                self._set_aside(entry, problem)
        return None

    def _is_current(self, entry: Entry) -> bool:
        """Whether it is still what its name finds; a reload of the index makes new entries."""
        return self._shelf.space.find(entry.info.ident) is entry

    def _set_aside(self, entry: Entry, problem: str) -> None:
        if entry.problem is None:
            self._shelf.space.set_aside(entry, problem)
            self._blamed[entry.info.ident] = entry
            self._counters.add(f"set_aside.{problem}")

    def _touch(self, found: Iterable[Entry | str]) -> None:
        # The head last: it is part of every longer prefix.
        for entry in reversed(list(found)):
            if isinstance(entry, Entry) and self._is_current(entry):
                self._shelf.space.touch(entry)
                self._touched.add(entry.info.ident)
