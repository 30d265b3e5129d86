"""Shared by the storage tests: records whose bytes follow from their key, and disks that fail.

A payload can be recomputed from its key alone, so any test may ask of any store whether what it
returns is what was stored.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cedar.cache.store import PrefixStore
from cedar.cache.store_files import FileSystem
from cedar.cache.store_format import RecordKind
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_records import Record

ROOT = b"r" * 32
SIZE = 3000
LIMIT = 1 << 20


def key(chain: int, position: int) -> bytes:
    """Key of block `position` of sequence `chain`."""
    return blake2b(b"%d/%d" % (chain, position), digest_size=32).digest()


def payload(name: bytes, size: int = SIZE, kind: RecordKind = RecordKind.GLOBAL) -> bytes:
    """The one right payload of a key."""
    return random.Random(name + bytes([kind])).randbytes(size)


def record(chain: int, position: int, *, depth: int = 0, size: int = SIZE) -> Record:
    """Block `position` of sequence `chain`."""
    name = key(chain, position)
    return Record(
        key=name, parent=key(chain, position - 1), start=4 * position, tokens=4, depth=depth,
        payload=payload(name, size),
    )  # fmt: skip


def window(chain: int, position: int, size: int = 20_000) -> Record:
    """Window state at the end of block `position`; continues that block."""
    name = blake2b(b"window of " + key(chain, position), digest_size=32).digest()
    return Record(
        key=name, parent=key(chain, position), start=4 * position + 4, tokens=0,
        payload=payload(name, size, RecordKind.WINDOW), kind=RecordKind.WINDOW,
    )  # fmt: skip


def chain(number: int, length: int, **fields: Any) -> list[Record]:
    """The blocks of one sequence."""
    return [record(number, i, **fields) for i in range(length)]


def names(records: Iterable[Record]) -> list[bytes]:
    return [r.key for r in records]


def open_store(
    directory: Path, *, root: bytes = ROOT, limit: int = LIMIT, size: int = SIZE,
    files: FileSystem | None = None,
) -> PrefixStore:  # fmt: skip
    return PrefixStore(directory, root=root, limit_bytes=limit, record_bytes=size, files=files)


def found(store: PrefixStore | PrefixReader, records: Sequence[Record]) -> list[bool]:
    """Which records the store returns; each that it returns must be right."""
    result = []
    for wanted in records:
        (hit,) = store.get_many([wanted.key], kind=wanted.kind)
        if hit is not None:
            assert bytes(hit.payload) == wanted.payload
            assert (hit.info.key, hit.info.parent) == (wanted.key, wanted.parent)
        result.append(hit is not None)
    return result


def every_record_is_right(store: PrefixStore | PrefixReader) -> int:
    """Read everything; each record must be whole and what its key says. Returns how many."""
    report = store.verify()
    assert report.sound, report
    infos = store.ls()
    for info in infos:
        (hit,) = store.get_many([info.key], kind=info.kind)
        assert hit is not None, info
        assert bytes(hit.payload) == payload(info.key, info.payload_bytes, info.kind)
    return len(infos)


def disk_bytes(directory: Path) -> int:
    """Sizes of all files, without the store's own arithmetic."""
    total = 0
    for where, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return total


class WatchedFiles(FileSystem):
    """Plain files that report every call that changes something.

    Args:
        before: called with the name and the number of the call; may raise.
    """

    def __init__(self, before: Callable[[str, int], None] | None = None) -> None:
        self.calls: list[str] = []
        self.before = before

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.before is not None:
            self.before(name, len(self.calls))

    def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._note("write")
        return super().write_at(fd, parts, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._note("allocate")
        super().allocate(fd, offset, length)

    def sync(self, fd: int) -> None:
        self._note("sync")
        super().sync(fd)

    def truncate(self, fd: int, length: int) -> None:
        self._note("truncate")
        super().truncate(fd, length)

    def unlink(self, path: Path) -> None:
        self._note("unlink")
        super().unlink(path)

    def statement(self, db: sqlite3.Connection, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self._note("statement")
        super().statement(db, sql, rows)

    def commit(self, db: sqlite3.Connection) -> None:
        self._note("commit")
        super().commit(db)

    def checkpoint(self, db: sqlite3.Connection) -> None:
        self._note("checkpoint")
        super().checkpoint(db)


def failure(name: str, kind: str) -> Exception:
    """The error that a full ("ENOSPC") or broken ("EIO") disk gives to a call."""
    if name in ("statement", "commit", "checkpoint"):
        text = "database or disk is full" if kind == "ENOSPC" else "disk I/O error"
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = sqlite3.SQLITE_FULL if kind == "ENOSPC" else sqlite3.SQLITE_IOERR
        error.sqlite_errorname = "SQLITE_FULL" if kind == "ENOSPC" else "SQLITE_IOERR"
        return error
    return OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
