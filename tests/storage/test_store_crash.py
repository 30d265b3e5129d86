"""Pins what is left after `kill -9` and after a power cut: every acknowledged record or none, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_cases import (
    WatchedFiles,
    chain,
    disk_bytes,
    every_record_is_right,
    found,
    open_store,
    record,
    window,
)

from cedar.cache.store_records import Record

SMALL, LARGE = 400_000, 8_000_000


def kill_writer(directory: Path, seed: int, limit: int, step: int) -> dict[int, int]:
    """Run a writing process and kill it; returns the longest acknowledged length per sequence."""
    script = Path(__file__).with_name("writing_process.py")
    process = subprocess.Popen(
        [sys.executable, script, directory, str(seed), str(limit), str(step)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process, process.stdout:
        if not step:
            assert process.stdout.readline() == "ready\n"
            time.sleep(random.Random(seed).uniform(0, 0.25))
            os.kill(process.pid, signal.SIGKILL)
        lines = process.stdout.read().splitlines()
    assert process.returncode == -signal.SIGKILL
    acknowledged: dict[int, int] = {}
    for line in lines:
        if line != "ready" and len(line.split()) == 2:
            number, length = map(int, line.split())
            acknowledged[number] = max(acknowledged.get(number, 0), length)
    return acknowledged


def kill_and_check(directory: Path, rounds: int, first_seed: int) -> None:
    """Kill a writer again and again on one directory; the store must be right every time."""
    for limit in (SMALL, LARGE):
        where = directory / str(limit)
        kept: dict[int, int] = {}
        for i in range(rounds // 2):
            seed = first_seed + i
            step = 0 if i % 2 else random.Random(seed).randrange(1, 150)
            for number, length in kill_writer(where, seed, limit, step).items():
                kept[number] = max(kept.get(number, 0), length)
            assert disk_bytes(where) <= limit
            with open_store(where, limit=limit) as store:
                every_record_is_right(store)
                # A kill while `gc` writes the index anew makes the next opening rebuild it.
                assert store.stats().reasons("set_aside").keys() <= {"index"}
                if limit == LARGE:  # nothing was evicted: all that was acknowledged is there
                    for number, length in kept.items():
                        assert all(found(store, chain(number, length)))
                assert disk_bytes(where) <= limit
        with open_store(where, limit=limit) as store:
            store.gc()
            live = store.stats().slots_used * store.slot_bytes
        assert disk_bytes(where) <= live + 200_000, "space leaked"


def test_after_20_kills_every_record_is_whole_and_none_is_lost(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 20, first_seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_200_kills_every_record_is_whole_and_none_is_lost(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 200, first_seed=1000)


class PowerCutError(Exception):
    """The machine is off."""


class CachedFiles(WatchedFiles):
    """A disk with a cache: written bytes reach the file with the next sync, or with a power cut in
    part, in any order, cut anywhere at a multiple of 512 bytes."""

    def __init__(self, step: int, rng: random.Random) -> None:
        super().__init__(self._cut)
        self.step, self.rng = step, rng
        self.cache: list[tuple[int, int, bytes]] = []

    def _cut(self, name: str, number: int) -> None:
        if number == self.step:
            sectors = [
                (fd, at + i, data[i : i + 512])
                for fd, at, data in self.cache
                for i in range(0, len(data), 512)
            ]
            for fd, at, sector in self.rng.sample(sectors, self.rng.randint(0, len(sectors))):
                os.pwrite(fd, sector, at)
            raise PowerCutError

    def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._note("write")
        data = b"".join(parts)
        self.cache.append((fd, offset, data))
        return len(data)

    def sync(self, fd: int) -> None:
        self._note("sync")
        for where, at, data in self.cache:
            os.pwrite(where, data, at)
        self.cache.clear()


def write_until_power_cut(
    directory: Path, limit: int, files: CachedFiles, rng: random.Random
) -> list[Record]:
    """What was acknowledged before the cut."""
    acknowledged: list[Record] = []
    store = None
    try:
        store = open_store(directory, limit=limit, files=files)
        while True:
            number, length = rng.randrange(12), rng.randrange(1, 12)
            store.put_many([*chain(number, length), window(number, length - 1)])
            acknowledged += chain(number, length)
    except PowerCutError:
        if store is not None:
            # Without the orderly `close`, which would write.
            store._shelf.close()
            os.close(store._lock_fd)
    return acknowledged


@pytest.mark.parametrize("limit", [SMALL, LARGE])
@pytest.mark.parametrize("seed", range(8))
def test_after_a_power_cut_no_record_is_wrong(tmp_path: Path, seed: int, limit: int) -> None:
    # What the index committed before the cut is on the disk here; that it may also be forgotten is
    # the next test.
    rng = random.Random(seed)
    acknowledged = []
    for _ in range(4):
        files = CachedFiles(rng.randrange(1, 120), rng)
        acknowledged += write_until_power_cut(tmp_path, limit, files, rng)
        with open_store(tmp_path, limit=limit) as store:
            every_record_is_right(store)
            assert not store.stats().reasons("set_aside")
            if limit == LARGE:  # nothing had to be evicted
                assert all(found(store, acknowledged))


def test_rows_forgotten_by_a_power_cut_are_misses_and_their_slots_are_used_again(
    tmp_path: Path,
) -> None:
    # The index may come back as it was some commits ago, while the slab has newer bytes.
    with open_store(tmp_path, limit=SMALL) as store:
        store.put_many(chain(0, 25))
    old = {path.name: path.read_bytes() for path in tmp_path.glob("index*")}
    with open_store(tmp_path, limit=SMALL) as store:
        capacity = store.stats().slots
        assert capacity is not None
        store.put_many(chain(1, capacity - 5))
        assert store.stats().counts["evicted"] >= 20
    for path in tmp_path.glob("index*"):
        path.unlink()
    for name, data in old.items():
        (tmp_path / name).write_bytes(data)
    with open_store(tmp_path, limit=SMALL) as store:
        hits = found(store, chain(0, 25))
        assert not all(hits)
        assert store.stats().reasons("set_aside").keys() == {"foreign"}
        assert found(store, chain(1, capacity)) == [False] * capacity
        assert store.put_many(chain(2, capacity - 1)) == capacity - 1
        assert all(found(store, chain(2, capacity - 1)))
        every_record_is_right(store)


def test_bytes_are_synced_before_their_row_is_committed(tmp_path: Path) -> None:
    files = WatchedFiles()
    with open_store(tmp_path, files=files) as store:
        del files.calls[:]
        store.put_many([record(0, 0), record(0, 1)])
        assert files.calls == ["allocate", "write", "write", "sync", "statement", "commit"]
        del files.calls[:]
        store.put_many([record(1, 0)])
        assert files.calls == ["allocate", "write", "sync", "statement", "commit"]


def test_a_row_is_gone_before_its_slot_is_used_again(tmp_path: Path) -> None:
    files = WatchedFiles()
    with open_store(tmp_path, limit=SMALL, files=files) as store:
        capacity = store.stats().slots
        assert capacity is not None
        store.put_many(chain(0, capacity))
        del files.calls[:]
        store.put_many([record(1, 0)])
        calls = [call for call in files.calls if call != "checkpoint"]
        assert calls == ["statement", "commit", "write", "sync", "statement", "commit"]
