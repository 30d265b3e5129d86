"""Pins one writer and many readers: in threads, in processes, while records come and go."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_cases import (
    chain,
    every_record_is_right,
    found,
    names,
    open_store,
    record,
    window,
)

from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_records import Record
from cedar.errors import StoreError

LIMIT = 400_000
HERE = Path(__file__).parent


def test_a_second_writer_is_refused_by_name(fast_path: Path) -> None:
    with (
        open_store(fast_path) as store,
        pytest.raises(
            StoreError, match=rf"{fast_path} is being written by process {os.getpid()} on"
        ),
    ):
        open_store(fast_path)
    assert store.put_many(chain(0, 1)) == 0
    with open_store(fast_path) as store:
        assert store.put_many(chain(0, 1)) == 1


def test_a_second_writing_process_is_refused_until_the_first_is_killed(fast_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, HERE / "writing_process.py", fast_path, "1", str(LIMIT), "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(StoreError, match=f"process {process.pid} on"):
            open_store(fast_path, limit=LIMIT)
        process.kill()
        process.wait()
    with open_store(fast_path, limit=LIMIT) as store:
        every_record_is_right(store)


def test_a_reader_sees_what_is_committed_while_the_writer_goes_on(fast_path: Path) -> None:
    with open_store(fast_path) as store, PrefixReader(fast_path, root=store.root) as reader:
        assert found(reader, chain(0, 2)) == [False, False]
        store.put_many([*chain(0, 2), window(0, 1)])
        assert found(reader, [*chain(0, 2), window(0, 1)]) == [True] * 3
        assert reader.contains_many(names(chain(0, 3))) == [True, True, False]
        store.delete([record(0, 1).key])
        assert found(reader, chain(0, 2)) == [True, False]
        store.gc()  # replaces the index under the reader
        store.put_many(chain(2, 2))
        assert found(reader, chain(2, 2)) == [True, True]
        assert reader.verify().sound


def test_a_reader_respects_depth_and_buffers_as_the_writer_does(fast_path: Path) -> None:
    with open_store(fast_path) as store:
        store.put_many([record(0, 0, depth=2)])
    with PrefixReader(fast_path) as reader:
        name = [record(0, 0).key]
        assert reader.contains_many(name, max_depth=1) == [False]
        assert reader.get_many(name, max_depth=1) == [None]
        assert reader.get_many(name, [bytearray(10)]) == [None]
        assert reader.get_many(name, max_depth=2) != [None]
        assert reader.stats().reasons("miss") == {"depth": 1, "size": 1}


def test_reading_what_is_no_store_is_refused(fast_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a prefix store"):
        PrefixReader(fast_path)
    with pytest.raises(StoreError, match="is not a prefix store"):
        PrefixReader(fast_path / "absent")


@pytest.mark.parametrize("seed", [1, 2])
def test_readers_during_writes_and_evictions_get_right_records_or_none(
    fast_path: Path, seed: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, HERE / "writing_process.py", fast_path, str(seed), str(LIMIT), "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    rng = random.Random(seed)
    hits = 0
    with process, process.stdout:
        assert process.stdout.readline() == "ready\n"
        process.stdout.readline()
        with PrefixReader(fast_path) as reader:
            for _ in range(150):
                hits += sum(found(reader, chain(rng.randrange(12), 8)))
            counts = reader.stats()
        process.kill()
    assert hits > 50
    # A slot that was reused under a read is not damage.
    assert counts.reasons("miss").keys() <= {"absent", "evicted", "io", "index"}, counts


def test_threads_that_read_while_others_write_get_right_records_or_none(fast_path: Path) -> None:
    errors: list[BaseException] = []
    stop = threading.Event()
    with open_store(fast_path, limit=LIMIT) as store:

        def write(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                number = rng.randrange(12)
                store.put_many([*chain(number, rng.randrange(1, 15)), window(number, 0)])

        def read(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(120):
                    found(store, chain(rng.randrange(12), 10))
            except BaseException as error:
                errors.append(error)

        writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in (*writers, *readers):
            thread.start()
        for thread in readers:
            thread.join()
        stop.set()
        for thread in writers:
            thread.join()
        assert not errors
        stats = store.stats()
        assert stats.reasons("miss").keys() <= {"absent"}
        assert stats.counts["loaded_records"] > 0
        assert not stats.reasons("error")
        assert stats.slots_used == sum(len(info.slots) for info in store.ls())
        every_record_is_right(store)


def test_fifty_conversations_in_random_order_under_load_never_get_each_others_rows(
    fast_path: Path,
) -> None:
    # Each conversation has one number in all its blocks; a block with another number is a wrong row.
    def talk(number: int) -> list[Record]:
        return [
            Record(
                key=r.key, parent=r.parent, start=r.start, tokens=r.tokens, payload=b"%05d" % number * 500
            )
            for r in chain(number, 4)
        ]  # fmt: skip

    rng = random.Random(0)
    wrong: list[int] = []

    def reload(order: list[int]) -> None:
        for number in order:
            for hit in store.get_many(names(talk(number))):
                if hit is not None and bytes(hit.payload) != b"%05d" % number * 500:
                    wrong.append(number)

    with open_store(fast_path, limit=900_000) as store:  # about 150 of the 200 blocks fit
        for number in range(50):
            store.put_many(talk(number))
        threads = [
            threading.Thread(target=reload, args=(rng.sample(range(50), 50),)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for number in rng.sample(range(50), 50):
            store.put_many(talk(number))
        for thread in threads:
            thread.join()
        assert store.stats().counts["evicted"] > 0
        assert store.stats().counts["loaded_records"] > 100
    assert not wrong
