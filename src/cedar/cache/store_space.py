"""The writer's picture of the slab: records by name, free slots, readers, who leaves next.

Also the budget: how many slots and how much index fit a size limit. No files. Not thread-safe:
`store.py` holds its lock around every call.

A record never leaves before the records that continue it: without its parent a block cannot be part
of a prefix. Next to leave is the least recently used record, or, if others continue it, the least
recently used end of those.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cedar.cache.store_format import RecordInfo, RecordKind
from cedar.cache.store_index import FRAME_BYTES, PAGE_BYTES, Ident
from cedar.errors import StoreError
from cedar.units import format_bytes

#: Index bytes set aside per slot: a row is about 190 bytes, pages are about two thirds full.
_INDEX_BYTES_PER_SLOT = 320
_INDEX_PAGES = 12
_SHARED_MEMORY_BYTES = 32768
_LOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Budget:
    """How a size limit is divided.

    Attributes:
        slots: slots the slab may have.
        index_pages: pages the index may have.
        log_bytes: bytes the log of the index may have.
    """

    slots: int
    index_pages: int
    log_bytes: int

    @classmethod
    def of(cls, limit_bytes: int, slot_bytes: int, other_bytes: int = 0) -> Budget:
        """Divide a limit so that all files together stay below it at all times.

        Args:
            limit_bytes: of the whole directory.
            slot_bytes: size of a slot.
            other_bytes: files in the directory that are not of this store version.

        Raises:
            StoreError: not one record fits; says how much is needed.
        """
        log = min(max(limit_bytes // 16, 40 * FRAME_BYTES), 1000 * FRAME_BYTES)
        fixed = log + _SHARED_MEMORY_BYTES + _LOCK_BYTES + _INDEX_PAGES * PAGE_BYTES + other_bytes
        slots = (limit_bytes - fixed) // (slot_bytes + _INDEX_BYTES_PER_SLOT)
        if slots < 1:
            need = fixed + slot_bytes + _INDEX_BYTES_PER_SLOT
            raise StoreError(
                f"a prefix store of {format_bytes(limit_bytes)} is too small: one record of "
                f"{format_bytes(slot_bytes)} and the index need {format_bytes(need)}; give at "
                f"least that much"
            )
        pages = _INDEX_PAGES + slots * _INDEX_BYTES_PER_SLOT // PAGE_BYTES
        return cls(slots, pages, log)


class Entry:
    """One record in memory.

    Attributes:
        info: what is stored; its `used` and `problem` are those of the index.
        used: order of last use.
        problem: why it is set aside; None while it is good.
        readers: reads in progress; they keep the slots from being reused.
        gone: no longer found.
    """

    __slots__ = ("gone", "info", "problem", "readers", "used")

    def __init__(self, info: RecordInfo) -> None:
        self.info, self.used, self.problem = info, info.used, info.problem
        self.readers = 0
        self.gone = False


class Space:
    """Records and slots of one slab.

    Args:
        capacity: slots the slab may have.
        num_slots: slots it has.
    """

    def __init__(self, capacity: int, num_slots: int) -> None:
        self.capacity, self.num_slots = capacity, num_slots
        self._free: list[int] = list(range(num_slots))  # a heap: low slots first
        self._entries: OrderedDict[Ident, Entry] = OrderedDict()  # least recently used first
        self._set_aside: dict[Ident, Entry] = {}
        self._children: dict[bytes, set[Ident]] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def num_set_aside(self) -> int:
        """Records that are set aside."""
        return len(self._set_aside)

    @property
    def slots_used(self) -> int:
        """Slots that hold records or are still being read."""
        return self.num_slots - len(self._free)

    def adopt(self, infos: Iterable[RecordInfo]) -> list[tuple[RecordInfo, str]]:
        """Take over the rows of an index, least recently used first.

        Returns:
            Rows that cannot be: outside the file ("truncated") or in another's slots ("foreign").
        """
        refused = []
        free = set(self._free)
        for info in infos:
            slots = set(info.slots)
            if max(slots) >= self.num_slots:
                refused.append((info, "truncated"))
            elif not slots <= free or len(slots) != len(info.slots):
                refused.append((info, "foreign"))
            else:
                free -= slots
                self.add(info)
        self._free = sorted(free)
        return refused

    def find(self, ident: Ident) -> Entry | None:
        """The record of this name, set aside or not."""
        return self._entries.get(ident)

    def add(self, info: RecordInfo) -> None:
        """Enter a record as the most recently used one, in place of an earlier one of its name."""
        self.remove(info.ident)
        entry = Entry(info)
        self._entries[info.ident] = entry
        if entry.problem is not None:
            self._set_aside[info.ident] = entry
        if info.start:
            self._children.setdefault(info.parent, set()).add(info.ident)
        self._clock = max(self._clock, info.used)

    def remove(self, ident: Ident) -> None:
        """Forget a record, if it is there; its slots are free once nobody reads them."""
        entry = self._entries.pop(ident, None)
        if entry is None:
            return
        self._set_aside.pop(ident, None)
        siblings = self._children.get(entry.info.parent)
        if siblings is not None:
            siblings.discard(ident)
            if not siblings:
                del self._children[entry.info.parent]
        entry.gone = True
        if not entry.readers:
            self.free(entry.info.slots)

    def next_use(self) -> int:
        """The next number in the order of use."""
        self._clock += 1
        return self._clock

    def touch(self, entry: Entry) -> None:
        """Make a record the most recently used one."""
        entry.used = self.next_use()
        self._entries.move_to_end(entry.info.ident)

    def set_aside(self, entry: Entry, problem: str) -> None:
        """Keep a bad record out of every hit until its space is needed."""
        entry.problem = problem
        if not entry.gone:
            self._set_aside[entry.info.ident] = entry

    def move(self, entry: Entry, info: RecordInfo) -> None:
        """A record was copied to other slots; its order of use stays."""
        self.free(entry.info.slots)
        entry.info = info

    def unpin(self, entry: Entry) -> None:
        """End one read."""
        entry.readers -= 1
        if entry.gone and not entry.readers:
            self.free(entry.info.slots)

    def take(self, count: int) -> tuple[int, ...]:
        """Take free slots, low ones first; the caller made sure there are enough."""
        return tuple(heapq.heappop(self._free) for _ in range(count))

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back."""
        for slot in slots:
            if slot < self.num_slots:
                heapq.heappush(self._free, slot)

    def resize(self, num_slots: int) -> None:
        """The file has this many slots now; slots beyond must be free."""
        for slot in range(self.num_slots, num_slots):
            heapq.heappush(self._free, slot)
        if num_slots < self.num_slots:
            self._free = [slot for slot in self._free if slot < num_slots]
            heapq.heapify(self._free)
        self.num_slots = num_slots

    def num_free_below(self, end: int) -> int:
        """Free slots with a number below `end`."""
        return sum(slot < end for slot in self._free)

    def end_of_used(self) -> int:
        """Slots up to and including the last one that is not free."""
        free = set(self._free)
        end = self.num_slots
        while end and end - 1 in free:
            end -= 1
        return end

    def lacking(self, count: int) -> int:
        """Slots that must be freed before `count` can be taken, the file grown to its capacity."""
        return count - len(self._free) - max(0, self.capacity - self.num_slots)

    def growth(self, count: int) -> int:
        """Slots the file should have so that `count` are free, at most its capacity."""
        more = max(0, count - len(self._free))
        return max(self.num_slots, min(self.capacity, self.num_slots + more))

    def unreachable(self) -> list[Entry]:
        """Records of which some earlier part of the prefix is not stored or set aside."""
        lost: list[Entry] = []
        whole: set[bytes] = set()
        for entry in sorted(self._entries.values(), key=lambda e: e.info.start):
            info = entry.info
            if entry.problem is None and (not info.start or info.parent in whole):
                if info.kind is RecordKind.GLOBAL:
                    whole.add(info.key)
            else:
                lost.append(entry)
        return lost

    def ancestors(self, info: RecordInfo) -> Iterator[Ident]:
        """The stored records that this one continues, nearest first."""
        while info.start:
            entry = self._entries.get(info.parent_ident)
            if entry is None:
                return
            yield info.parent_ident
            info = entry.info

    def victims(self, count: int, keep: set[Ident]) -> list[Entry]:
        """Records to remove so that `count` slots become free; fewer if there are not enough.

        Never one that is being read, is in `keep`, or is continued by one that stays. Records that
        were set aside go first.
        """
        chosen: dict[Ident, Entry] = {}
        freed = 0
        for name, entry in self._set_aside.items():
            if freed < count and not entry.readers:
                chosen[name] = entry
                freed += len(entry.info.slots)
        seen: set[Ident] = set()
        for ident in self._entries:
            for entry in self._ends_first(ident, seen):
                if freed >= count:
                    return list(chosen.values())
                name = entry.info.ident
                stays = entry.readers or name in keep or name in chosen
                if not stays and all(child in chosen for child in self._children_of(entry)):
                    chosen[name] = entry
                    freed += len(entry.info.slots)
        return list(chosen.values())

    def _children_of(self, entry: Entry) -> Iterable[Ident]:
        if entry.info.kind is not RecordKind.GLOBAL:
            return ()
        return self._children.get(entry.info.key, ())

    def _ends_first(self, ident: Ident, seen: set[Ident]) -> Iterator[Entry]:
        """A record and all that continue it, each after those that continue it, oldest first."""
        stack = [(ident, False)]
        while stack:
            name, expanded = stack.pop()
            entry = self._entries[name]
            if expanded:
                yield entry
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                children = [(self._entries[c].used, c) for c in self._children_of(entry)]
                stack.extend((child, False) for _, child in sorted(children, reverse=True))
