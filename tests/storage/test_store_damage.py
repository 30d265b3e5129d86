"""Pins that every flipped byte and every cut of a store is caught: a miss, counted, set aside."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_cases import (
    ROOT,
    SIZE,
    chain,
    every_record_is_right,
    found,
    names,
    open_store,
    record,
    window,
)

from cedar.cache.store_files import INDEX_NAME, LOCK_NAME, FileSystem, find_slab
from cedar.cache.store_format import (
    LAYOUT_VERSION,
    RecordInfo,
    RecordKind,
    encode_header,
    header_bytes,
)
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_slab import Slab
from cedar.errors import StoreError

RECORDS = [*chain(0, 3), window(0, 1, size=9000)]


@pytest.fixture
def small(fast_path: Path) -> Path:
    """A closed store of three blocks and one window state of three slots: six slots in all."""
    directory = fast_path / "store"
    with open_store(directory) as store:
        assert store.put_many(RECORDS) == 4
        assert store.gc() == 0
    return directory


def slab_of(directory: Path) -> Path:
    slab = find_slab(directory)
    assert slab is not None
    return slab[0]


@contextmanager
def flipped(path: Path, offset: int, mask: int) -> Iterator[None]:
    """The file with one byte changed, for a while."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ mask]), offset)
        yield
        os.pwrite(fd, byte, offset)
    finally:
        os.close(fd)


def test_every_flipped_byte_of_the_slab_is_one_miss(small: Path) -> None:
    with PrefixReader(small) as reader:
        infos = reader.ls()
    path = slab_of(small)
    size = path.stat().st_size
    assert size == 6 * 4096
    owner = {slot: info for info in infos for slot in info.slots}
    slab = Slab(path, 4096, FileSystem(), writable=False)
    for offset in range(size):
        mask = 1 << offset % 8
        with flipped(path, offset, mask):
            info = owner[offset // 4096]
            assert slab.read(info, memoryview(bytearray(info.payload_bytes))) is not None, offset
    slab.close()


@pytest.mark.parametrize(
    "offset",
    [*range(0, 176, 3), 164 + SIZE // 2, 164 + SIZE - 1, 164 + SIZE, 4095],
)
def test_a_flipped_byte_costs_one_record_and_is_set_aside(small: Path, offset: int) -> None:
    # One place in each region: header fields, payload, padding.
    with open_store(small) as store, flipped(slab_of(small), offset, 0x40):
        first = found(store, RECORDS)
        assert sorted(first) == [False, True, True, True]
        bad = RECORDS[first.index(False)]
        # Set aside: no second read, no loop, and it is stored again when it comes again.
        misses = store.stats().reasons("miss")
        assert found(store, RECORDS) == first
        assert store.stats().reasons("miss") == {**misses, "set_aside": 1}
        assert sum(store.stats().reasons("set_aside").values()) == 1
        assert not store.verify().sound
        assert store.put_many([bad]) == 1
        assert found(store, RECORDS) == [True] * 4
        assert every_record_is_right(store) == 4


@pytest.mark.parametrize("left", [0, 1, 4096, 4097, 3 * 4096, 6 * 4096 - 1])
def test_a_cut_slab_loses_the_records_behind_the_cut_and_no_other(small: Path, left: int) -> None:
    with PrefixReader(small) as reader:
        whole = [max(info.slots) * 4096 + 4096 <= left for info in reader.ls()]
    path = slab_of(small)
    path.write_bytes(path.read_bytes()[:left])
    with PrefixReader(small) as reader:
        assert sum(found(reader, RECORDS)) == sum(whole)
        assert not reader.verify().sound
    with open_store(small) as store:
        assert sum(found(store, RECORDS)) == sum(whole)
        store.put_many(RECORDS)
        assert found(store, RECORDS) == [True] * 4
        every_record_is_right(store)


@pytest.mark.parametrize("left", [0, 1, SIZE // 2, SIZE + 163])
def test_a_slab_cut_under_an_open_store_gives_misses(small: Path, left: int) -> None:
    with open_store(small) as store:
        os.truncate(slab_of(small), left)
        assert found(store, RECORDS) == [False] * 4
        assert store.stats().reasons("miss") == {"truncated": 4}
        store.put_many(RECORDS)
        every_record_is_right(store)


def check_damaged_index(directory: Path) -> None:
    """A reader returns right records or none; a writer has everything again or starts without."""
    try:
        with PrefixReader(directory) as reader:
            found(reader, RECORDS)
            reader.verify()
    except StoreError:
        pass
    with open_store(directory) as store:
        found(store, RECORDS)
        store.put_many(RECORDS)
        assert found(store, RECORDS) == [True] * 4
        store.verify()  # sets aside a row whose own name was hit
        store.gc()
        assert found(store, RECORDS) == [True] * 4
        every_record_is_right(store)


def index_offsets(data: bytes, every: int) -> list[int]:
    """Offsets of all bytes that carry something, and of a sample of the empty ones."""
    return [i for i, byte in enumerate(data) if (byte and i % every == 0) or i % 331 == 0]


def flip_index(small: Path, fast_path: Path, every: int) -> None:
    index = (small / INDEX_NAME).read_bytes()
    for offset in index_offsets(index, every):
        directory = fast_path / "copy"
        shutil.copytree(small, directory)
        data = bytearray(index)
        data[offset] ^= 1 << offset % 8
        (directory / INDEX_NAME).write_bytes(data)
        check_damaged_index(directory)
        shutil.rmtree(directory)


def test_flipped_bytes_of_the_index_give_right_records_or_none(
    small: Path, fast_path: Path
) -> None:
    flip_index(small, fast_path, every=7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_flipped_byte_of_the_index_gives_right_records_or_none(
    small: Path, fast_path: Path
) -> None:
    flip_index(small, fast_path, every=1)


def test_flipped_and_cut_logs_of_a_killed_writer_give_right_records_or_none(
    small: Path, fast_path: Path
) -> None:
    killed = fast_path / "killed"
    with open_store(small) as store:
        store.delete([RECORDS[-1].key], kind=RECORDS[-1].kind)
        store.put_many([*RECORDS, *chain(1, 2)])
        shutil.copytree(small, killed)  # what a kill leaves: the log was not emptied
    log = (killed / f"{INDEX_NAME}-wal").read_bytes()
    assert len(log) > 4096
    for offset in range(0, len(log), 257):
        for damaged in (log[:offset], log[:offset] + bytes([log[offset] ^ 1]) + log[offset + 1 :]):
            directory = fast_path / "copy"
            shutil.copytree(killed, directory)
            (directory / f"{INDEX_NAME}-wal").write_bytes(damaged)
            check_damaged_index(directory)
            shutil.rmtree(directory)


@pytest.mark.parametrize("left", [0, 1, 100, 4095, 4096, 5000, 8192, 9000])
def test_a_cut_index_is_rebuilt_from_the_slab(small: Path, left: int) -> None:
    path = small / INDEX_NAME
    path.write_bytes(path.read_bytes()[:left])
    with open_store(small) as store:
        assert found(store, RECORDS) == [True] * 4
        assert store.stats().reasons("set_aside") == {"index": 1}


def test_a_lost_index_is_rebuilt_from_the_slab(small: Path) -> None:
    (small / INDEX_NAME).unlink()
    (small / LOCK_NAME).write_bytes(b"\0garbage")
    with open_store(small) as store:
        assert found(store, RECORDS) == [True] * 4
        assert store.contains_many(names(RECORDS[:3]), max_depth=0) == [True] * 3
        assert every_record_is_right(store) == 4


def test_a_rebuilt_index_takes_the_copy_of_the_smallest_depth(fast_path: Path) -> None:
    # The slab still has the bytes of the record that was replaced, in a slot behind.
    with open_store(fast_path) as store:
        store.put_many(chain(1, 1))
        store.put_many([record(0, 0, depth=1)])
        store.delete(names(chain(1, 1)))
        store.put_many([record(0, 0, depth=0)])
        assert [info.slots for info in store.ls()] == [(0,)]
    (fast_path / INDEX_NAME).unlink()
    with open_store(fast_path) as store:
        assert [(info.slots, info.depth) for info in store.ls()] == [((0,), 0)]
        assert store.stats().slots_used == 1


def test_a_lost_slab_is_an_empty_store(small: Path) -> None:
    slab_of(small).unlink()
    with PrefixReader(small) as reader:
        assert found(reader, RECORDS) == [False] * 4
        assert len(reader.verify().damaged) == 4
    with open_store(small) as store:
        assert found(store, RECORDS) == [False] * 4
        assert store.put_many(RECORDS) == 4


def forge(directory: Path, info: RecordInfo, payload: bytes, version: int = LAYOUT_VERSION) -> None:
    """Write a record with a right checksum into the slab, whatever the index says."""
    header = bytearray(encode_header(info, 4096, memoryview(payload)))
    if version != LAYOUT_VERSION:
        header[8:10] = struct.pack("<H", version)
    padding = bytes(4096 - header_bytes(1) - len(payload))
    with slab_of(directory).open("r+b") as file:
        file.seek(4096 * info.slots[0])
        file.write(bytes(header) + payload + padding)


@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"k" * 32}, {"root": b"o" * 32}, {"parent": b"p" * 32}, {"start": 8}, {"tokens": 3},
        {"depth": 1}, {"kind": RecordKind.WINDOW}, {"payload_bytes": SIZE - 1},
    ],
)  # fmt: skip
def test_a_whole_record_that_is_another_one_is_foreign(
    small: Path, fields: dict[str, object]
) -> None:
    # As after a slot was reused under a stale row: the checksum holds, the record is not this one.
    with PrefixReader(small) as reader:
        info = next(info for info in reader.ls() if info.key == RECORDS[0].key)
    values = {name: getattr(info, name) for name in RecordInfo.__dataclass_fields__}
    other = RecordInfo(**{**values, **fields})
    forge(small, other, b"x" * other.payload_bytes)
    with open_store(small) as store:
        assert found(store, RECORDS) == [False, True, True, True]
        assert store.stats().reasons("set_aside") == {"foreign": 1}


def test_a_record_of_a_newer_layout_is_a_miss(small: Path) -> None:
    with PrefixReader(small) as reader:
        info = next(info for info in reader.ls() if info.key == RECORDS[0].key)
    forge(small, info, bytes(RECORDS[0].payload), version=LAYOUT_VERSION + 1)
    with open_store(small) as store:
        assert found(store, RECORDS) == [False, True, True, True]
        assert store.stats().reasons("set_aside") == {"version": 1}


def test_files_of_a_newer_store_version_are_left_alone_and_count(tmp_path: Path) -> None:
    with open_store(tmp_path, limit=1_000_000) as store:
        alone = store.stats().slots
    newer = tmp_path / "rows-v2-4096.slab"
    newer.write_bytes(b"\1" * 300_000)
    with open_store(tmp_path, limit=1_000_000) as store:
        slots = store.stats().slots
        assert alone is not None
        assert slots is not None
        assert alone - slots >= 300_000 // 4416
        store.put_many(chain(0, 300))
        assert store.stats().bytes_on_disk <= 1_000_000
    assert newer.read_bytes() == b"\1" * 300_000


def test_a_reader_remembers_what_is_bad_and_changes_nothing(small: Path) -> None:
    before = slab_of(small).read_bytes()
    with PrefixReader(small) as reader, flipped(slab_of(small), 4096 + 500, 1):
        first = found(reader, RECORDS)
        assert first.count(False) == 1
        assert found(reader, RECORDS) == first
        misses = reader.stats().reasons("miss")
        assert misses == {"damaged": 1, "set_aside": 1}
    assert slab_of(small).read_bytes() == before
    with open_store(small) as store:
        assert found(store, RECORDS) == [True] * 4


def test_a_bad_record_stays_set_aside_over_a_restart_until_gc(small: Path) -> None:
    slab = slab_of(small)
    with open_store(small) as store, flipped(slab, 600, 1):
        found(store, RECORDS)
    with open_store(small) as store:
        assert store.stats().records_set_aside == 1
        assert found(store, RECORDS).count(False) == 1
        # The prefix ends where the bad record was; what continues it goes too.
        store.gc()
        assert store.stats().records_set_aside == 0
        every_record_is_right(store)


def test_a_block_in_the_wrong_place_is_never_returned(tmp_path: Path) -> None:
    # Two slots with their contents exchanged: each is whole, each is in the other's place.
    with open_store(tmp_path) as store:
        store.put_many(chain(0, 2))
        slab = slab_of(tmp_path)
        data = slab.read_bytes()
        slab.write_bytes(data[4096:8192] + data[:4096] + data[8192:])
        assert found(store, chain(0, 2)) == [False, False]
        assert store.stats().reasons("set_aside") == {"foreign": 2}


def test_wrong_root_of_an_index_row_cannot_make_a_hit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_many([record(0, 0)])
    data = (tmp_path / INDEX_NAME).read_bytes()
    assert ROOT in data
    (tmp_path / INDEX_NAME).write_bytes(data.replace(ROOT, b"s" * 32))
    with open_store(tmp_path, root=b"s" * 32) as store:
        assert found(store, [record(0, 0)]) == [False]
        assert store.stats().reasons("miss") == {"foreign": 1}
