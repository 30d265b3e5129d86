"""Pins what a store returns when nothing goes wrong: everything stored, after reopening too."""

from __future__ import annotations

import stat
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

from cedar.cache.store_format import RecordKind
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_records import Record
from cedar.errors import StoreError, UsageError


def test_what_was_stored_is_returned_before_and_after_reopening(tmp_path: Path) -> None:
    records = [*chain(0, 5), window(0, 2)]
    with open_store(tmp_path) as store:
        assert store.put_many(records) == 6
        assert all(found(store, records))
    with open_store(tmp_path) as store:
        assert all(found(store, records))
        (hit,) = store.get_many([records[3].key])
        assert hit is not None
        assert (hit.info.start, hit.info.tokens, hit.info.depth) == (12, 4, 0)
        assert hit.info.root == ROOT


def test_payloads_arrive_in_the_callers_buffers(tmp_path: Path) -> None:
    records = chain(0, 3)
    buffers = [bytearray(SIZE) for _ in records]
    with open_store(tmp_path) as store:
        store.put_many(records)
        store.get_many(names(records), into=buffers)
    assert buffers == [r.payload for r in records]


def test_a_buffer_of_another_size_is_a_miss(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_many(chain(0, 1))
        assert store.get_many(names(chain(0, 1)), into=[bytearray(SIZE + 1)]) == [None]
        assert store.stats().reasons("miss") == {"size": 1}
        assert all(found(store, chain(0, 1)))


def test_global_rows_and_windows_of_one_key_are_two_records(tmp_path: Path) -> None:
    rows = record(0, 0)
    state = Record(
        key=rows.key, parent=rows.parent, start=0, tokens=4, payload=b"w" * 50_000,
        kind=RecordKind.WINDOW,
    )  # fmt: skip
    with open_store(tmp_path) as store:
        store.put_many([rows, state])
        assert found(store, [rows, state]) == [True, True]
        assert store.delete([rows.key]) == 1
        assert found(store, [rows, state]) == [False, True]


@pytest.mark.parametrize("size", [0, 1, 3932, 3933, 8024, 8025, 100_000])
def test_payloads_of_any_size_fill_whole_slots(tmp_path: Path, size: int) -> None:
    # 3932 = 4096 - 160 - 4 is the largest payload of one slot, 8024 = 8192 - 160 - 8 of two.
    with open_store(tmp_path) as store:
        stored = record(0, 0, size=size)
        assert store.put_many([stored]) == 1
        assert all(found(store, [stored]))
        assert store.stats().slots_used == -(-(size + 160) // 4092)


def test_a_smaller_depth_replaces_a_larger_one_and_never_the_reverse(tmp_path: Path) -> None:
    name = record(0, 0).key
    with open_store(tmp_path) as store:
        assert store.put_many([record(0, 0, depth=2)]) == 1
        assert store.contains_many([name], max_depth=0) == [False]
        assert store.get_many([name], max_depth=1) == [None]
        assert store.put_many([record(0, 0, depth=3)]) == 0
        assert store.put_many([record(0, 0, depth=0)]) == 1
        assert store.contains_many([name], max_depth=0) == [True]
        assert store.stats().slots_used == 1
    with open_store(tmp_path) as store:
        (hit,) = store.get_many([name], max_depth=0)
        assert hit is not None
        assert hit.info.depth == 0


def test_a_block_without_its_prefix_is_not_stored(tmp_path: Path) -> None:
    records = chain(0, 4)
    with open_store(tmp_path) as store:
        assert store.put_many([records[0], records[2], records[3]]) == 1
        assert store.stats().reasons("dropped") == {"no_parent": 2}
        assert store.put_many(records) == 3


def test_records_of_another_root_are_misses(tmp_path: Path) -> None:
    # Weights, block size, dtype, row format, tokenizer: all of them are in the root and in the key.
    records = chain(0, 3)
    with open_store(tmp_path) as store:
        store.put_many(records)
    with open_store(tmp_path, root=b"s" * 32) as store:
        assert found(store, records) == [False] * 3
        assert store.contains_many(names(records)) == [False] * 3
        assert store.stats().reasons("miss") == {"foreign": 3}
    with PrefixReader(tmp_path, root=b"s" * 32) as reader:
        assert found(reader, records) == [False] * 3


def test_a_store_made_for_other_records_still_works(tmp_path: Path) -> None:
    with open_store(tmp_path, size=3000) as store:
        store.put_many(chain(0, 3))
    with open_store(tmp_path, size=30_000) as store:
        assert store.slot_bytes == 4096
        assert store.put_many(chain(1, 3, size=30_000)) == 3
        assert all(found(store, chain(0, 3)))
        assert all(found(store, chain(1, 3, size=30_000)))


def test_hits_misses_and_bytes_are_counted_and_survive_reopening(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_many(chain(0, 2))
        store.get_many([*names(chain(0, 2)), b"x" * 32])
        counts = dict(store.stats().counts)
    assert counts == {
        "stored_records": 2, "stored_bytes": 2 * SIZE, "loaded_records": 2,
        "loaded_bytes": 2 * SIZE, "miss.absent": 1,
    }  # fmt: skip
    with PrefixReader(tmp_path) as reader:
        assert dict(reader.stats().counts) == counts


def test_the_directory_is_private(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "store"
    with open_store(directory) as store:
        store.put_many(chain(0, 1))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        modes = {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in directory.glob("*.slab")}
        assert modes == {0}
    directory.chmod(0o755)
    with open_store(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    tmp_path.chmod(0o755)
    with pytest.raises(StoreError, match=r"holds 'thesis.txt'"):
        open_store(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_mistakes_of_the_caller_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(UsageError, match="key has 3 bytes"):
            store.put_many([Record(key=b"abc", parent=ROOT, start=0, tokens=1, payload=b"")])
        with pytest.raises(UsageError, match="allowed are 984"):
            store.put_many([record(0, 0, size=5_000_000)])
        with pytest.raises(UsageError, match="2 keys need as many buffers, 1 were given"):
            store.get_many([b"a" * 32, b"b" * 32], into=[bytearray(1)])
    with pytest.raises(StoreError, match="too small"):
        open_store(tmp_path / "b", limit=100_000)


def test_after_closing_everything_misses_and_nothing_is_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_many(chain(0, 2))
    store.close()
    store.close()
    assert found(store, chain(0, 2)) == [False, False]
    assert store.put_many(chain(1, 1)) == 0
    assert store.delete(names(chain(0, 2))) == 0
    with open_store(tmp_path) as store:
        assert every_record_is_right(store) == 2


def test_gc_gives_the_space_of_removed_records_back(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_many(chain(0, 20))
        store.put_many([*chain(1, 4), window(1, 3)])
        before = store.stats().bytes_on_disk
        store.delete(names(chain(0, 20)))
        assert store.gc() == 0
        assert store.stats().bytes_on_disk <= before - 20 * 4096
        assert store.stats().slots_used == 9
        assert every_record_is_right(store) == 5
        assert store.put_many(chain(2, 6)) == 6
    with open_store(tmp_path) as store:
        assert every_record_is_right(store) == 11


def test_gc_removes_what_no_lookup_can_reach(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_many([*chain(0, 6), window(0, 4)])
        store.delete([record(0, 3).key])
        assert store.gc() == 3
        assert found(store, chain(0, 6)) == [True] * 3 + [False] * 3
