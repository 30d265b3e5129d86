"""Every system call of the prefix store, one method each, so that a test can make any of them fail.

Also the directory itself: its mode, the names in it, and the lock of the one writer. What the bytes
mean is in `store_format.py`. Called by `store_slab.py`, `store_index.py` and the two stores.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import sqlite3
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cedar.errors import StoreError

#: Seconds that a killed writer may take until it is gone.
_ENDING_SECONDS = 2.0
_POLL_SECONDS = 0.02

LOCK_NAME = "LOCK"
INDEX_NAME = "index-v1.sqlite"
_SLAB = re.compile(r"rows-v1-([0-9]{4,9})\.slab")


class FileSystem:
    """Plain system calls on slab files, and the writing statements of the index."""

    def open(self, path: Path, flags: int) -> int:
        """`open(2)`, new files readable by the owner only."""
        return os.open(path, flags, 0o600)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """`pwritev(2)`; may write less than asked."""
        return os.pwritev(fd, parts, offset)

    def read_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """`preadv(2)`; may read less than asked, 0 at the end of the file."""
        return os.preadv(fd, parts, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """`posix_fallocate(3)`: claim disk space before anything is written there."""
        os.posix_fallocate(fd, offset, length)

    def sync(self, fd: int) -> None:
        """`fdatasync(2)`."""
        os.fdatasync(fd)

    def truncate(self, fd: int, length: int) -> None:
        """`ftruncate(2)`."""
        os.ftruncate(fd, length)

    def will_need(self, fd: int, offset: int, length: int) -> None:
        """`posix_fadvise(2)`, WILLNEED: start reading in the background."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)

    def unlink(self, path: Path) -> None:
        """`unlink(2)`."""
        path.unlink(missing_ok=True)

    def statement(self, db: sqlite3.Connection, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run a writing statement of the index once per row, inside a transaction."""
        db.executemany(sql, rows)

    def commit(self, db: sqlite3.Connection) -> None:
        """Commit the transaction of the index."""
        db.execute("COMMIT")

    def checkpoint(self, db: sqlite3.Connection) -> None:
        """Move the index's log into its database and empty the log, if no reader needs it."""
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def slab_name(slot_bytes: int) -> str:
    """File name of the slab with slots of this size; the name says it, so there is no header."""
    return f"rows-v1-{slot_bytes}.slab"


def find_slab(directory: Path) -> tuple[Path, int] | None:
    """The slab of a store and its slot size: of several, the one with the most bytes."""
    found = []
    for path in directory.iterdir():
        match = _SLAB.fullmatch(path.name)
        if match is not None and int(match[1]) % 4096 == 0 and path.is_file():
            found.append((path.stat().st_size, path, int(match[1])))
    if not found:
        return None
    _, path, slot_bytes = max(found)
    return path, slot_bytes


def directory_bytes(directory: Path, leave_out: Iterable[str] = ()) -> int:
    """Sizes of all files in a store, added up."""
    total = 0
    skip = set(leave_out)
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and path.name not in skip:
                total += status.st_size
    return total


def prepare_directory(directory: Path) -> None:
    """Create a store's directory, or take an empty one or one of ours; mode 0700.

    Raises:
        StoreError: it holds something else, is no directory, or cannot be made or entered.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = sorted(path.name for path in directory.iterdir())
        if names and LOCK_NAME not in names and INDEX_NAME not in names:
            raise StoreError(
                f"{directory} is not a prefix store: it holds {names[0]!r} and no {LOCK_NAME}; "
                f"give an empty or a new directory"
            )
        if directory.stat().st_mode & 0o777 != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise StoreError(f"prefix store {directory} cannot be used: {error}") from error


def take_lock(directory: Path, *, wait_seconds: float = 0.0) -> int:
    """Become the writer of a store. The lock ends with the returned descriptor or the process.

    Args:
        wait_seconds: how long another writer may take to end.

    Raises:
        StoreError: another process, which is named, writes there.
    """
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(f"prefix store {directory} cannot be locked: {error}") from error
    try:
        _lock(fd, time.monotonic() + wait_seconds)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder, 0)
    except BlockingIOError:
        holder = os.pread(fd, 4096, 0)
        os.close(fd)
        raise StoreError(
            f"prefix store {directory} is being written by {_describe(holder)}; one writer is "
            f"allowed: stop it, give another directory, or open this one for reading"
        ) from None
    except OSError as error:
        os.close(fd)
        raise StoreError(f"prefix store {directory} cannot be locked: {error}") from error
    return fd


def _lock(fd: int, deadline: float) -> None:
    """Raises BlockingIOError if it is still held at the deadline."""
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_SECONDS)


def check_usable(directory: Path) -> None:
    """Find out now what would keep a store from being opened later, before a model is loaded.

    A writer that has just been killed holds its lock until the system has taken its memory back;
    that is waited for, so that a restart is not refused.

    Raises:
        StoreError: as `prepare_directory` and `take_lock`.
    """
    prepare_directory(directory)
    os.close(take_lock(directory, wait_seconds=_ENDING_SECONDS))


def _describe(holder: bytes) -> str:
    try:
        document = json.loads(holder)
        return f"process {int(document['pid'])} on {document['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that did not say who it is"
