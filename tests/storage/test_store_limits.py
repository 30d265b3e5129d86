"""Pins the size limit, at every moment, and who has to leave when it is reached."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_cases import (
    WatchedFiles,
    chain,
    disk_bytes,
    every_record_is_right,
    found,
    names,
    open_store,
    record,
    window,
)

from cedar.cache.store import PrefixStore
from cedar.cache.store_files import FileSystem
from cedar.cache.store_format import RecordKind
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_space import Budget

LIMIT = 400_000


def capacity_of(store: PrefixStore) -> int:
    slots = store.stats().slots
    assert slots is not None
    return slots


@pytest.mark.parametrize("size", [500, 3000, 30_000])
def test_three_times_the_limit_never_takes_more_than_the_limit(fast_path: Path, size: int) -> None:
    # Measured at every call that changes a file, and by a second thread all the time.
    limit = 1_000_000
    most = 0

    def measure(*_: object) -> None:
        nonlocal most
        most = max(most, disk_bytes(fast_path))

    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            measure()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with open_store(fast_path, limit=limit, size=size, files=WatchedFiles(measure)) as store:
            written = number = 0
            while written < 3 * limit:
                records = [*chain(number, 10, size=size), window(number, 9, size=3 * size)]
                store.put_many(records)
                found(store, records)
                written += sum(len(r.payload) // 4096 * 4096 + 4096 for r in records)
                number += 1
            assert store.stats().counts["evicted"] > 0
            assert not store.stats().reasons("error")
            used = store.stats().slots_used * store.slot_bytes
        with open_store(fast_path, limit=limit, size=size, files=WatchedFiles(measure)) as store:
            every_record_is_right(store)
    finally:
        stop.set()
        thread.join()
    assert most <= limit
    assert used >= 0.6 * limit, "the limit is not made use of"


def test_a_large_store_spends_under_two_percent_on_everything_but_slots() -> None:
    budget = Budget.of(8 << 30, 114_688)
    assert budget.slots * 114_688 >= 0.98 * (8 << 30)


def test_the_log_of_the_index_never_outgrows_its_share(fast_path: Path) -> None:
    # Every row on its own page, deletes and inserts mixed: the worst that put_many can do.
    limit, largest = 3_000_000, 0

    def measure(*_: object) -> None:
        nonlocal largest
        log = fast_path / "index-v1.sqlite-wal"
        largest = max(largest, log.stat().st_size if log.exists() else 0)

    with open_store(fast_path, limit=limit, size=100, files=WatchedFiles(measure)) as store:
        for number in range(60):
            store.put_many(chain(number, 25, size=100))
        measure()
        assert store.stats().counts["evicted"] > 500
        assert not store.stats().reasons("error")
    assert 0 < largest <= Budget.of(limit, 4096).log_bytes


def test_the_least_recently_used_sequence_leaves_first_and_from_its_end(fast_path: Path) -> None:
    with open_store(fast_path, limit=LIMIT) as store:
        capacity = capacity_of(store)
        length = capacity // 3
        for number in range(3):
            store.put_many(chain(number, length))
        found(store, chain(0, length))  # 1 is the oldest now
        free = capacity - 3 * length
        store.put_many(chain(3, free + 4))
        assert all(found(store, chain(0, length)))
        assert found(store, chain(1, length)) == [True] * (length - 4) + [False] * 4
        assert all(found(store, chain(2, length)))


def test_touching_a_sequence_found_elsewhere_keeps_it(fast_path: Path) -> None:
    with open_store(fast_path, limit=LIMIT) as store:
        capacity = capacity_of(store)
        store.put_many(chain(0, 5))
        store.put_many(chain(1, capacity - 5))
        store.touch(names(chain(0, 5)))
        store.put_many(chain(2, 8))
        assert all(found(store, chain(0, 5)))


def test_the_order_of_use_survives_reopening(fast_path: Path) -> None:
    with open_store(fast_path, limit=LIMIT) as store:
        length = capacity_of(store) // 2
        for number in range(2):
            store.put_many(chain(number, length))
        found(store, chain(0, length))
    with open_store(fast_path, limit=LIMIT) as store:
        store.put_many(chain(2, 6))
        assert all(found(store, chain(0, length)))
        assert not all(found(store, chain(1, length)))


def test_a_growing_conversation_does_not_eat_its_own_head(fast_path: Path) -> None:
    with open_store(fast_path, limit=LIMIT) as store:
        capacity = capacity_of(store)
        for length in range(1, capacity + 10):
            store.put_many([record(0, length - 1)])
        assert found(store, chain(0, capacity + 9)) == [True] * capacity + [False] * 9
        assert store.stats().reasons("dropped") == {"no_room": 1, "no_parent": 8}


def test_a_growing_conversation_outlives_a_finished_one(fast_path: Path) -> None:
    # Its head is older than all of the other's blocks, its end is the newest.
    with open_store(fast_path, limit=LIMIT) as store:
        half = capacity_of(store) // 2
        store.put_many(chain(0, 2))
        store.put_many(chain(1, half))
        for length in range(3, half - 5):
            store.put_many([record(0, length - 1)])
        store.put_many(chain(2, 15))
        assert store.contains_many(names(chain(0, half - 6))) == [True] * (half - 6)
        assert store.contains_many(names(chain(1, half)))[-1] is False


def test_what_was_just_written_stays_and_the_rest_is_dropped(fast_path: Path) -> None:
    with open_store(fast_path, limit=LIMIT) as store:
        capacity = capacity_of(store)
        assert store.put_many(chain(0, capacity + 7)) == capacity
        assert found(store, chain(0, capacity + 7)) == [True] * capacity + [False] * 7


def test_what_is_being_read_is_not_evicted(fast_path: Path) -> None:
    class SlowReads(FileSystem):
        """Fills the store with other records in the middle of a read."""

        store: PrefixStore | None = None

        def read_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            store, self.store = self.store, None
            if store is not None:
                # More than the whole store: everything that may be evicted is.
                for number in range(5):
                    store.put_many(chain(10 + number, capacity))
            return super().read_at(fd, parts, offset)

    files = SlowReads()
    with open_store(fast_path, limit=LIMIT, files=files) as store:
        capacity = capacity_of(store)
        store.put_many(chain(0, 6))
        files.store = store
        # Only the last block is read; those before it stay with it, or it would be of no use.
        assert all(store.get_many([record(0, 5).key]))
        assert store.stats().counts["evicted"] > 0
        assert store.contains_many(names(chain(0, 6))) == [True] * 6
        assert store.stats().reasons("miss") == {}
        every_record_is_right(store)


def test_deleting_what_is_being_read_does_not_disturb_the_read(fast_path: Path) -> None:
    class DeletesFirst(FileSystem):
        store: PrefixStore | None = None

        def read_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            store, self.store = self.store, None
            if store is not None:
                store.delete(names(chain(0, 6)))
                store.put_many(chain(1, capacity))
            return super().read_at(fd, parts, offset)

    files = DeletesFirst()
    with open_store(fast_path, limit=LIMIT, files=files) as store:
        capacity = capacity_of(store)
        store.put_many(chain(0, 6))
        files.store = store
        hits = store.get_many(names(chain(0, 6)))
        assert [bytes(hit.payload) for hit in hits if hit] == [r.payload for r in chain(0, 6)]
        assert store.contains_many(names(chain(0, 6))) == [False] * 6
        # The six slots are free again now.
        assert store.put_many(chain(2, capacity)) == capacity


def test_a_smaller_limit_is_kept_after_opening(fast_path: Path) -> None:
    with open_store(fast_path, limit=3_000_000) as store:
        for number in range(30):
            store.put_many([*chain(number, 10), window(number, 9, size=30_000)])
        found(store, chain(5, 10))
    with open_store(fast_path, limit=500_000) as store:
        assert disk_bytes(fast_path) <= 500_000
        assert every_record_is_right(store) >= 20
        assert all(found(store, chain(5, 10)))
        store.put_many(chain(99, 10))
        assert all(found(store, chain(99, 10)))
        assert disk_bytes(fast_path) <= 500_000


def test_a_smaller_limit_also_shrinks_the_index(fast_path: Path) -> None:
    with open_store(fast_path, limit=9_000_000) as store:
        for number in range(40):
            store.put_many(chain(number, 40, size=100))
        before = store.stats().counts["stored_records"]
    with open_store(fast_path, limit=500_000) as store:
        assert disk_bytes(fast_path) <= 500_000
        assert every_record_is_right(store) >= 20
    with PrefixReader(fast_path) as reader:
        assert reader.stats().counts["stored_records"] == before == 1600


def test_gc_to_a_size_evicts_down_to_it(fast_path: Path) -> None:
    with open_store(fast_path, limit=3_000_000) as store:
        for number in range(30):
            store.put_many([*chain(number, 10), window(number, 9, size=30_000)])
        assert store.gc(500_000) > 250
        assert disk_bytes(fast_path) <= 500_000
        assert every_record_is_right(store) >= 20


def test_a_reader_that_never_ends_cannot_make_the_log_grow(fast_path: Path) -> None:
    # Its snapshot keeps the log from being emptied: then records are dropped, and later not.
    with open_store(fast_path, limit=LIMIT) as store:
        store.put_many(chain(0, 4))
        with PrefixReader(fast_path) as reader:
            rows = reader._db.execute("SELECT records.key FROM records, records AS more")
            rows.fetchone()
            for number in range(1, 40):
                store.put_many(chain(number, 8))
                assert disk_bytes(fast_path) <= LIMIT
            assert store.stats().reasons("error").keys() <= {"ENOSPC"}
            assert store.stats().reasons("dropped").get("error", 0) > 0
            rows.close()
        assert store.put_many(chain(50, 8)) == 8
        assert all(found(store, chain(50, 8)))
        every_record_is_right(store)


def test_window_states_leave_before_the_blocks_they_continue(fast_path: Path) -> None:
    with open_store(fast_path, limit=LIMIT) as store:
        capacity = capacity_of(store)
        store.put_many([*chain(0, 5), window(0, 2), window(0, 4)])
        store.put_many(chain(1, capacity - 10))
        hits = found(store, [*chain(0, 5), window(0, 2), window(0, 4)])
        assert all(hits[:5])
        assert not all(hits[5:])
        assert store.contains_many([window(0, 2).key], kind=RecordKind.GLOBAL) == [False]
