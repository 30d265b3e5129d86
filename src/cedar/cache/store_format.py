"""The bytes of a stored record, version 1: header, payload, padding, checksum. Pure; no files.

A record fills whole slots of the slab. All numbers are little-endian.

    offset
         0   8  magic "CEDARKV" and a zero
         8   2  layout version            10   2  kind: 1 global rows, 2 window state
        12   4  number of slots           16   4  bytes per slot         20   4  replay depth
        24   8  tokens before             32   8  tokens                 40   8  payload bytes
        48  32  fingerprint root
        80  32  key                      112  32  key of the prefix before it
       144  16  XXH3-128 of everything else in the record's slots
       160 4 n  slot numbers, first to last
         .   .  payload
         .   .  zeros up to the end of the last slot

The slot numbers are inside the checksum, so a record is valid only where it was written. Called by
`store_slab.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

import xxhash

from cedar.cache.hashing import KEY_BYTES
from cedar.errors import UsageError

LAYOUT_VERSION = 1
SLOT_ALIGNMENT = 4096
#: Slots of one record; keeps the header, slot numbers included, inside the first slot.
MAX_SLOTS = (SLOT_ALIGNMENT - 160) // 4

_MAGIC = b"CEDARKV\0"
_FIXED = struct.Struct("<8sHHIIIQQQ32s32s32s16s")
_CHECKSUM = slice(144, 160)

Problem = Literal["truncated", "damaged", "version", "foreign", "io"]


class RecordKind(IntEnum):
    """What a record's payload is: rows of one block, or the windows at one position."""

    GLOBAL = 1
    WINDOW = 2


_KINDS = frozenset(RecordKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfo:
    """Everything about a record except its payload.

    Attributes:
        kind: what the payload is; records of different kinds may have one key.
        root: fingerprint of the model and the way of computing.
        key: chain key of the tokens up to the end of the record.
        parent: chain key of the tokens before it; `start` = 0 means it has none in the store.
        start: tokens before the record.
        tokens: tokens of the record.
        depth: bounded replays its rows descend from.
        payload_bytes: bytes of the payload.
        slots: slot numbers in the slab, in order.
        used: order of last use among the records of a store; greater is later.
        problem: why the record was set aside; None if it is whole as far as known.
    """

    kind: RecordKind
    root: bytes
    key: bytes
    parent: bytes
    start: int
    tokens: int
    depth: int
    payload_bytes: int
    slots: tuple[int, ...] = ()
    used: int = 0
    problem: str | None = None

    @property
    def ident(self) -> tuple[RecordKind, bytes]:
        """What identifies the record within a store."""
        return self.kind, self.key

    @property
    def parent_ident(self) -> tuple[RecordKind, bytes]:
        """What identifies the record that this one continues, if `start` > 0."""
        return RecordKind.GLOBAL, self.parent

    def at(self, used: int) -> RecordInfo:
        """The same record with another order of use."""
        return replace(self, used=used)


def header_bytes(num_slots: int) -> int:
    """Bytes before the payload of a record of `num_slots` slots."""
    return _FIXED.size + 4 * num_slots


def slot_bytes_for(payload_bytes: int) -> int:
    """Slot size in which a record of this payload takes one slot: rounded up to 4096 bytes."""
    return -(-(header_bytes(1) + payload_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def slots_for(payload_bytes: int, slot_bytes: int) -> int:
    """Slots that a record of this payload takes.

    Raises:
        UsageError: it would take more than `MAX_SLOTS`.
    """
    if payload_bytes < 0:
        raise UsageError(f"a payload of {payload_bytes} bytes is not possible")
    count = max(1, -(-(header_bytes(0) + payload_bytes) // (slot_bytes - 4)))
    if count > MAX_SLOTS:
        raise UsageError(
            f"a record of {payload_bytes} bytes takes {count} slots of {slot_bytes} bytes; allowed "
            f"are {MAX_SLOTS}: use a store whose records are larger, or a smaller window"
        )
    return count


def encode_header(info: RecordInfo, slot_bytes: int, payload: memoryview) -> bytes:
    """Header of a record, checksum included.

    Args:
        info: with its slots set.
        slot_bytes: size of a slot of this slab.
        payload: `info.payload_bytes` bytes.
    """
    header = _unsigned_header(info, slot_bytes)
    padding = bytes(padding_bytes(info, slot_bytes))
    header[_CHECKSUM] = _checksum((header, payload, padding))
    return bytes(header)


def padding_bytes(info: RecordInfo, slot_bytes: int) -> int:
    """Zeros after the payload of a record."""
    count = len(info.slots)
    return count * slot_bytes - header_bytes(count) - info.payload_bytes


def check_record(
    info: RecordInfo, slot_bytes: int, header: bytes, payload: memoryview, padding: bytes
) -> Problem | None:
    """Whether the bytes read are the record that was asked for.

    Args:
        info: what the index says is stored there.
        slot_bytes: size of a slot of this slab.
        header, payload, padding: everything in the record's slots.

    Returns:
        None if it is; "version" for another layout version, "damaged" if the checksum fails,
        "foreign" for a whole record that is another one.
    """
    if header[:8] != _MAGIC:
        return "damaged"
    if struct.unpack_from("<H", header, 8)[0] != LAYOUT_VERSION:
        return "version"
    blank = bytearray(header)
    blank[_CHECKSUM] = bytes(16)
    if _checksum((blank, payload, padding)) != header[_CHECKSUM]:
        return "damaged"
    return None if blank == _unsigned_header(info, slot_bytes) else "foreign"


def decode_header(header: bytes, slot_bytes: int) -> RecordInfo | None:
    """What a header says, or None if it cannot be one of this version and slot size.

    Does not look at the checksum, which covers the payload too.
    """
    if len(header) < _FIXED.size:
        return None
    magic, version, kind, count, size, depth, start, tokens, payload, root, key, parent, _ = (
        _FIXED.unpack_from(header)
    )
    known = magic == _MAGIC and version == LAYOUT_VERSION and size == slot_bytes
    if not known or kind not in _KINDS or not 1 <= count <= MAX_SLOTS:
        return None
    if len(header) < header_bytes(count) or payload > count * slot_bytes - header_bytes(count):
        return None
    return RecordInfo(
        kind=RecordKind(kind), root=root, key=key, parent=parent, start=start, tokens=tokens,
        depth=depth, payload_bytes=payload,
        slots=struct.unpack_from(f"<{count}I", header, _FIXED.size),
    )  # fmt: skip


def check_names(root: bytes, key: bytes, parent: bytes) -> None:
    """Refuse names that would not fit a header.

    Raises:
        UsageError: one is not 32 bytes long.
    """
    for name, value in (("root", root), ("key", key), ("parent", parent)):
        if len(value) != KEY_BYTES:
            raise UsageError(f"{name} has {len(value)} bytes, a store needs {KEY_BYTES}")


def _unsigned_header(info: RecordInfo, slot_bytes: int) -> bytearray:
    fields = (
        _MAGIC, LAYOUT_VERSION, info.kind, len(info.slots), slot_bytes, info.depth, info.start,
        info.tokens, info.payload_bytes, info.root, info.key, info.parent, bytes(16),
    )  # fmt: skip
    numbers = struct.pack(f"<{len(info.slots)}I", *info.slots)
    return bytearray(_FIXED.pack(*fields) + numbers)


def _checksum(parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
