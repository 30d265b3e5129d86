"""Pins what happens when a write, sync, or index statement fails: a miss, then it works again."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store_cases import (
    WatchedFiles,
    chain,
    disk_bytes,
    every_record_is_right,
    failure,
    found,
    open_store,
    window,
)

from cedar.cache.store import PrefixStore
from cedar.cache.store_files import FileSystem
from cedar.errors import StoreError

LIMIT = 330_000  # 18 slots


def work(store: PrefixStore) -> None:
    """One of everything that changes files: grow, evict, replace, delete, move, shrink, note."""
    store.put_many([*chain(0, 4, depth=1), window(0, 2)])
    found(store, chain(0, 4))
    store.put_many([*chain(1, 12), window(1, 8)])
    store.put_many(chain(0, 4))
    store.delete([r.key for r in [*chain(0, 4)[1:], *chain(1, 12)[8:]]])
    store.gc()
    store.flush()


def calls_of_work(directory: Path) -> list[str]:
    files = WatchedFiles()
    with open_store(directory, limit=LIMIT, files=files) as store:
        del files.calls[:]
        work(store)
    return files.calls


class FailingFiles(WatchedFiles):
    """Files whose calls from `first` to `last` fail.

    Args:
        kind: "ENOSPC", "EIO", or "short": a write does half of its bytes and then the disk is full.
    """

    def __init__(self, first: int, last: int, kind: str) -> None:
        super().__init__(self._fail)
        self.first, self.last, self.kind = first, last, kind
        self.armed = False
        self.failed = 0

    def _fail(self, name: str, number: int) -> None:
        if self.armed and self.first <= number <= self.last:
            self.failed += 1
            raise failure(name, "ENOSPC" if self.kind == "short" else self.kind)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        coming = len(self.calls) + 1
        if self.armed and self.kind == "short" and coming == self.first:
            self.calls.append("write")
            self.last = coming + 1
            return os.pwrite(fd, parts[0][: len(parts[0]) // 2 + 1], offset)
        return super().write_at(fd, parts, offset)


@pytest.fixture(scope="module")
def num_calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    calls = calls_of_work(tmp_path_factory.mktemp("count"))
    assert {"allocate", "write", "sync", "statement", "commit", "truncate", "unlink",
            "checkpoint"} == set(calls)  # fmt: skip
    return len(calls)


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "short"])
def test_any_call_may_fail_once(fast_path: Path, num_calls: int, kind: str) -> None:
    for step in range(1, num_calls + 1):
        directory = fast_path / f"{kind}{step}"
        files = FailingFiles(step, step, kind)
        with open_store(directory, limit=LIMIT, files=files) as store:
            del files.calls[:]
            files.armed = True
            work(store)
            files.armed = False
            assert store.stats().reasons("error") or not files.failed
            every_record_is_right(store)
            # It has recovered: what is stored now is there, and nothing has leaked.
            store.put_many(chain(2, 8))
            assert all(found(store, chain(2, 8)))
            assert disk_bytes(directory) <= LIMIT
            used = sum(len(info.slots) for info in store.ls())
            assert store.stats().slots_used == used
        with open_store(directory, limit=LIMIT) as store:
            assert all(found(store, chain(2, 8)))
            every_record_is_right(store)
            assert not store.stats().reasons("set_aside")
        shutil.rmtree(directory)


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_everything_may_fail_from_some_call_on(fast_path: Path, num_calls: int, kind: str) -> None:
    for step in range(1, num_calls + 1, 4):
        directory = fast_path / f"{kind}{step}"
        files = FailingFiles(step, 1 << 30, kind)
        with open_store(directory, limit=LIMIT, files=files) as store:
            store.put_many(chain(3, 5))
            before = found(store, chain(3, 5))
            del files.calls[:]
            files.armed = True
            work(store)
            assert found(store, chain(3, 5)) in (before, [False] * 5)
            found(store, chain(0, 4))
            assert store.put_many(chain(4, 3)) == 0
            files.armed = False
            assert store.put_many(chain(4, 3)) == 3
            assert all(found(store, chain(4, 3)))
            every_record_is_right(store)
        shutil.rmtree(directory)


def test_short_writes_are_carried_on(tmp_path: Path) -> None:
    class SmallSteps(FileSystem):
        def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            return os.pwrite(fd, parts[0][:1000], offset)

        def read_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            return os.preadv(fd, [parts[0][:700]], offset)

    with open_store(tmp_path, files=SmallSteps()) as store:
        store.put_many([*chain(0, 3), window(0, 1)])
        assert all(found(store, [*chain(0, 3), window(0, 1)]))


def test_a_write_that_does_nothing_is_an_error(tmp_path: Path) -> None:
    class Nothing(FileSystem):
        def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            return 0

    with open_store(tmp_path, files=Nothing()) as store:
        assert store.put_many(chain(0, 1)) == 0
        assert store.stats().reasons("error") == {"EIO": 1}


def test_a_failed_read_is_a_miss_and_not_the_records_fault(tmp_path: Path) -> None:
    class Unreadable(FileSystem):
        broken = True

        def read_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            if self.broken:
                raise OSError(errno.EIO, "broken")
            return super().read_at(fd, parts, offset)

    files = Unreadable()
    with open_store(tmp_path, files=files) as store:
        store.put_many(chain(0, 2))
        assert found(store, chain(0, 2)) == [False, False]
        assert store.stats().reasons("miss") == {"io": 2}
        files.broken = False
        assert found(store, chain(0, 2)) == [True, True]


@pytest.mark.parametrize("reuse", [False, True])
def test_reads_go_on_while_a_failed_index_is_opened_again(fast_path: Path, reuse: bool) -> None:
    class FailsDuringRead(WatchedFiles):
        """In the middle of a read, a commit fails and the next write reads the index again."""

        store: PrefixStore | None = None
        fail_commit = False

        def commit(self, db: sqlite3.Connection) -> None:
            if self.fail_commit:
                self.fail_commit = False
                raise failure("commit", "EIO")
            super().commit(db)

        def read_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            store, self.store = self.store, None
            if store is not None:
                self.fail_commit = True
                assert store.put_many(chain(1, 2)) == 0
                store.delete([r.key for r in chain(0, 4)[2:]])
                assert store.put_many(chain(1, 2) if reuse else []) == 2 * reuse
            return super().read_at(fd, parts, offset)

    files = FailsDuringRead()
    with open_store(fast_path, limit=LIMIT, files=files) as store:
        store.put_many(chain(0, 4))
        files.store = store
        hits = store.get_many([r.key for r in chain(0, 4)])
        assert [bytes(hit.payload) for hit in hits[:2] if hit] == [r.payload for r in chain(0, 2)]
        assert found(store, chain(0, 4)) == [True, True, False, False]
        assert store.stats().records_set_aside == 0
        assert every_record_is_right(store) == 2 + 2 * reuse


def test_a_store_that_cannot_be_opened_says_so_and_gives_the_lock_back(tmp_path: Path) -> None:
    class Full(FileSystem):
        def checkpoint(self, db: sqlite3.Connection) -> None:
            raise failure("checkpoint", "ENOSPC")

    with pytest.raises(StoreError, match="cannot be opened: database or disk is full"):
        open_store(tmp_path, files=Full())
    with open_store(tmp_path) as store:
        assert store.put_many(chain(0, 1)) == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", mount],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_really_full_disk_costs_records_and_nothing_else(full_disk: Path) -> None:
    directory = full_disk / "store"
    with open_store(directory, limit=4_000_000) as store:
        for number in range(30):
            store.put_many(chain(number, 10))
            found(store, chain(number, 10))
        assert store.stats().reasons("error")
        kept = every_record_is_right(store)
        assert kept >= 50
        store.delete([r.key for number in range(4) for r in chain(number, 10)])
        assert store.put_many(chain(99, 5)) == 5
    with open_store(directory, limit=4_000_000) as store:
        assert all(found(store, chain(99, 5)))
        every_record_is_right(store)
