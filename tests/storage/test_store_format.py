"""Pins the bytes of a record: version 1 must stay readable, or the version must change."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cedar.cache.store_format import (
    LAYOUT_VERSION,
    MAX_SLOTS,
    RecordInfo,
    RecordKind,
    check_record,
    decode_header,
    encode_header,
    header_bytes,
    padding_bytes,
    slot_bytes_for,
    slots_for,
)
from cedar.errors import UsageError

INFO = RecordInfo(
    kind=RecordKind.WINDOW, root=b"r" * 32, key=b"k" * 32, parent=b"p" * 32, start=256, tokens=128,
    depth=3, payload_bytes=5, slots=(7, 9),
)  # fmt: skip


def test_the_header_has_the_documented_fields_at_the_documented_offsets() -> None:
    assert LAYOUT_VERSION == 1
    header = encode_header(INFO, 4096, memoryview(b"hello"))
    assert header[:8] == b"CEDARKV\0"
    assert struct.unpack_from("<HHIII", header, 8) == (1, 2, 2, 4096, 3)
    assert struct.unpack_from("<QQQ", header, 24) == (256, 128, 5)
    assert header[48:144] == b"r" * 32 + b"k" * 32 + b"p" * 32
    assert struct.unpack_from("<II", header, 160) == (7, 9)
    assert len(header) == 168
    blank = header[:144] + bytes(16) + header[160:]
    rest = b"hello" + bytes(2 * 4096 - 168 - 5)
    assert header[144:160] == xxhash.xxh3_128(blank + rest).digest()
    assert decode_header(header, 4096) == INFO


def test_a_record_is_valid_only_in_its_own_slots() -> None:
    header = encode_header(INFO, 4096, memoryview(b"hello"))
    padding = bytes(padding_bytes(INFO, 4096))
    assert check_record(INFO, 4096, header, memoryview(b"hello"), padding) is None
    moved = RecordInfo(**{n: getattr(INFO, n) for n in INFO.__slots__} | {"slots": (7, 8)})
    assert check_record(moved, 4096, header, memoryview(b"hello"), padding) == "foreign"


@given(st.integers(0, 3_000_000), st.sampled_from([4096, 8192, 114_688]))
def test_a_record_takes_the_fewest_slots_that_hold_it(payload: int, slot: int) -> None:
    count = slots_for(payload, slot)
    assert header_bytes(count) + payload <= count * slot
    assert count == 1 or header_bytes(count - 1) + payload > (count - 1) * slot
    assert slots_for(payload, slot_bytes_for(payload)) == 1


def test_the_largest_header_fits_the_smallest_slot() -> None:
    assert header_bytes(MAX_SLOTS) <= 4096
    largest = MAX_SLOTS * (4096 - 4) - 160
    assert slots_for(largest, 4096) == MAX_SLOTS
    with pytest.raises(UsageError, match="allowed are 984"):
        slots_for(largest + 1, 4096)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_header_or_none_of_ours(data: bytes) -> None:
    assert decode_header(data, 4096) is None
    decode_header(encode_header(INFO, 4096, memoryview(b"hello"))[:8] + data, 4096)


def test_the_releases_block_takes_one_slot_of_114688_bytes() -> None:
    assert slot_bytes_for(113_920) == 114_688
