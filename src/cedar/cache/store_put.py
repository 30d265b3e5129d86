"""Storing one batch: which records are worth it, what leaves for them, and the write itself.

Called by `store.py` with the writer's turn taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cedar.cache.store_format import RecordInfo, slots_for
from cedar.cache.store_index import Ident
from cedar.cache.store_records import Record, as_bytes
from cedar.cache.store_shelf import Shelf
from cedar.cache.store_space import Entry, Space

_BATCH_BYTES = 32 << 20

Planned = tuple[RecordInfo, memoryview]


@dataclass(slots=True)
class PutResult:
    """What became of the records of a call: stored, evicted for them, dropped by reason."""

    stored_bytes: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def leading_batch(records: Sequence[Record], rows: int) -> list[Record]:
    """The records at the front that go into one write: at least one."""
    size = 0
    batch: list[Record] = []
    for record in records[:rows]:
        size += len(as_bytes(record.payload))
        if batch and size > _BATCH_BYTES:
            break
        batch.append(record)
    return batch


def put_batch(
    shelf: Shelf, root: bytes, batch: Sequence[Record], written: set[Ident], result: PutResult
) -> None:
    """Store a batch.

    Args:
        shelf: the files.
        root: fingerprint the records carry.
        batch: parents first.
        written: records stored just now, which stay; those of this batch are added.
        result: what becomes of the batch is added here.

    Raises:
        OSError, sqlite3.Error: nothing of the batch was stored; others may have been evicted.
    """
    with shelf.lock:
        plan, keep = _choose(shelf, root, batch, result)
        keep |= written
        lacking = shelf.space.lacking(sum(len(info.slots) for info, _ in plan))
        victims = shelf.space.victims(lacking, keep) if lacking > 0 else []
    if victims:
        shelf.evict(victims)
        result.evicted += len(victims)
    plan = _fit(shelf, plan, result)
    if plan:
        shelf.write(plan)
    written.update(info.ident for info, _ in plan)
    result.stored += len(plan)
    result.stored_bytes += sum(info.payload_bytes for info, _ in plan)


def _choose(
    shelf: Shelf, root: bytes, batch: Sequence[Record], result: PutResult
) -> tuple[list[Planned], set[Ident]]:
    """Records worth storing, with as many placeholder slots as they need, and what must stay."""
    space = shelf.space
    plan: dict[Ident, Planned] = {}
    keep: set[Ident] = set()
    for record in batch:
        payload = as_bytes(record.payload)
        info = RecordInfo(
            kind=record.kind, root=root, key=record.key, parent=record.parent, start=record.start,
            tokens=record.tokens, depth=record.depth, payload_bytes=len(payload),
            slots=(0,) * slots_for(len(payload), shelf.slot_bytes),
        )  # fmt: skip
        entry = space.find(info.ident)
        if entry is not None and _is_as_good(entry, info):
            space.touch(entry)
            keep.add(info.ident)
            result.dropped["stored_already"] += 1
        elif info.ident in plan:
            result.dropped["stored_already"] += 1
        elif record.start and not _parent_is_there(space, info, plan):
            result.dropped["no_parent"] += 1
        else:
            plan[info.ident] = (info, payload)
            for ident in space.ancestors(info):
                if ident in keep:
                    break
                keep.add(ident)
    _touch_from_the_end(space, keep)
    return list(plan.values()), keep | plan.keys()


def _is_as_good(entry: Entry, info: RecordInfo) -> bool:
    """Whether what is stored under a record's name makes storing the record pointless."""
    stored = entry.info
    return entry.problem is None and stored.root == info.root and stored.depth <= info.depth


def _parent_is_there(space: Space, info: RecordInfo, plan: dict[Ident, Planned]) -> bool:
    ident = info.parent_ident
    entry = space.find(ident)
    return ident in plan or (entry is not None and entry.problem is None)


def _touch_from_the_end(space: Space, idents: set[Ident]) -> None:
    """Renew records that are being continued; the head last, it is part of every longer prefix."""
    entries = [entry for entry in map(space.find, idents) if entry is not None]
    for entry in sorted(entries, key=lambda entry: -entry.info.start):
        space.touch(entry)


def _fit(shelf: Shelf, plan: list[Planned], result: PutResult) -> list[Planned]:
    """Take slots for the leading records that have room; the others are dropped."""
    need = sum(len(info.slots) for info, _ in plan)
    shelf.grow(shelf.space.growth(need))
    placed: list[Planned] = []
    with shelf.lock:
        room = shelf.space.num_slots - shelf.space.slots_used
        for info, payload in plan:
            room -= len(info.slots)
            if room < 0:
                break
            slots = shelf.space.take(len(info.slots))
            placed.append((replace(info, slots=slots, used=shelf.space.next_use()), payload))
    if len(placed) < len(plan):
        result.dropped["no_room"] += len(plan) - len(placed)
    return placed
