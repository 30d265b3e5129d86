"""The index of a prefix store: a small SQLite database that says which record is in which slots.

A record exists exactly if its row is committed, and a row is committed only after the record's
bytes were synced. WAL with synchronous=NORMAL: after a power cut the newest rows may be forgotten,
which makes their records misses. Called by `store.py` (the writer) and `store_reader.py`.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cedar.cache.hashing import KEY_BYTES
from cedar.cache.store_files import FileSystem
from cedar.cache.store_format import RecordInfo, RecordKind, slots_for
from cedar.errors import UsageError

PAGE_BYTES = 4096
FRAME_BYTES = PAGE_BYTES + 24

_SCHEMA = """
CREATE TABLE records (
    kind INTEGER, key BLOB, root BLOB, parent BLOB, start INTEGER, tokens INTEGER, depth INTEGER,
    bytes INTEGER, slots BLOB, used INTEGER, problem TEXT, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
"""
_COLUMNS = "kind, key, root, parent, start, tokens, depth, bytes, slots, used, problem"
#: `user_version` of a complete index; a rebuild sets it last.
_COMPLETE = 1

#: A flipped letter in the schema gives SQLITE_ERROR, a flipped file version SQLITE_READONLY.
_DAMAGE_CODES = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
)

_KINDS = frozenset(RecordKind)

#: Seconds the writer waits for readers to leave the log; they take well under a millisecond each.
_PATIENCE = 0.05

Ident = tuple[RecordKind, bytes]


def log_frames(num_rows: int) -> int:
    """Pages a transaction over this many rows may write: the row's page and its share of splits."""
    return 3 * num_rows + 12


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the database is broken, not that it is locked or the disk full."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _DAMAGE_CODES


class StoreIndex:
    """The writer's end of the index.

    Args:
        path: the database file.
        files: system calls.
        max_pages: pages the database may grow to.
        log_bytes: bytes the write-ahead log may grow to.

    Raises:
        sqlite3.Error: the file is damaged or the disk is full.
    """

    def __init__(self, path: Path, files: FileSystem, *, max_pages: int, log_bytes: int) -> None:
        self._files, self._log_bytes = files, log_bytes
        self._log = path.with_name(path.name + "-wal")
        self._db = sqlite3.connect(
            path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        self._db.text_factory = _text
        try:
            for pragma in (
                f"page_size={PAGE_BYTES}", "journal_mode=WAL", "synchronous=NORMAL",
                "temp_store=MEMORY", "cache_spill=OFF", "wal_autocheckpoint=0",
                f"max_page_count={max_pages}",
            ):  # fmt: skip
                self._db.execute(f"PRAGMA {pragma}").fetchall()
            if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                self._db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            if self._db.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("integrity_check found damage")
        except UnicodeDecodeError as error:
            self._db.close()
            raise _unreadable_message(error) from error
        except BaseException:
            self._db.close()
            raise

    @property
    def complete(self) -> bool:
        """Whether `finish` was called since the file was created."""
        return bool(self._db.execute("PRAGMA user_version").fetchone()[0] == _COMPLETE)

    def finish(self) -> None:
        """Mark a new index as holding every record of the slab, and empty the log."""
        self._db.execute(f"PRAGMA user_version={_COMPLETE}")
        self._files.checkpoint(self._db)

    @property
    def rows_per_change(self) -> int:
        """Rows that one `change` may touch and stay inside the log's limit."""
        return max(1, (self._log_bytes // FRAME_BYTES - log_frames(0)) // 3)

    def load(self, slot_bytes: int) -> Iterator[RecordInfo | Ident]:
        """All rows, least recently used first; a row that makes no sense comes as its identity."""
        yield from read_rows(self._db, slot_bytes)

    def change(self, delete: Sequence[Ident] = (), insert: Sequence[RecordInfo] = ()) -> None:
        """Delete and insert rows in one transaction.

        Raises:
            OSError: ENOSPC: a reader keeps the log from being emptied, and it has grown enough.
            sqlite3.Error: nothing was changed.
        """
        values = [
            (
                info.kind, info.key, info.root, info.parent, info.start, info.tokens, info.depth,
                info.payload_bytes, struct.pack(f"<{len(info.slots)}I", *info.slots), info.used,
                info.problem,
            )
            for info in insert
        ]  # fmt: skip
        marks = ", ".join("?" * 11)
        self._transact(
            (
                ("DELETE FROM records WHERE kind = ? AND key = ?", list(delete)),
                (f"INSERT OR REPLACE INTO records ({_COLUMNS}) VALUES ({marks})", values),
            )
        )

    def note(self, used: Mapping[Ident, int], problems: Mapping[Ident, str]) -> None:
        """Store the order of use of some records, and why others were set aside."""
        self._transact(
            (
                (
                    "UPDATE records SET used = ? WHERE kind = ? AND key = ?",
                    [(order, *ident) for ident, order in used.items()],
                ),
                (
                    "UPDATE records SET problem = ? WHERE kind = ? AND key = ?",
                    [(problem, *ident) for ident, problem in problems.items()],
                ),
            )
        )

    def add_counters(self, counts: Mapping[str, int]) -> None:
        """Add to the counters that outlive the process."""
        sql = (
            "INSERT INTO counters VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
        )
        self._transact(((sql, [(name, n) for name, n in counts.items() if n]),))

    def counters(self) -> dict[str, int]:
        """The counters that outlive the process."""
        return read_counters(self._db)

    def close(self) -> None:
        """Close; the last connection empties and removes the log."""
        self._db.close()

    def _transact(self, statements: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> None:
        rows = sum(len(values) for _, values in statements)
        if not rows:
            return
        self._make_room(log_frames(rows))
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for sql, values in statements:
                if values:
                    self._files.statement(self._db, sql, values)
            self._files.commit(self._db)
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _make_room(self, frames: int) -> None:
        if self._log_size() + frames * FRAME_BYTES <= self._log_bytes:
            return
        self._files.checkpoint(self._db)
        if self._log_size() + frames * FRAME_BYTES > self._log_bytes:
            raise OSError(errno.ENOSPC, "a reader keeps the log of the index from being emptied")

    def _log_size(self) -> int:
        try:
            return os.stat(self._log).st_size
        except FileNotFoundError:
            return 0


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that sees committed rows and writes none.

    Raises:
        sqlite3.Error: the file is absent, damaged or not a database.
    """
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0, isolation_level=None,
        check_same_thread=False,
    )  # fmt: skip
    db.text_factory = _text
    try:
        db.execute("SELECT count(*) FROM records").fetchone()
    except UnicodeDecodeError as error:
        db.close()
        raise _unreadable_message(error) from error
    except BaseException:
        db.close()
        raise
    return db


def read_rows(db: sqlite3.Connection, slot_bytes: int) -> Iterator[RecordInfo | Ident]:
    """All rows, least recently used first; a row that makes no sense comes as its identity."""
    for row in db.execute(f"SELECT {_COLUMNS} FROM records ORDER BY used, kind, key"):
        info = _info(row, slot_bytes)
        yield info if info is not None else (row[0], row[1])


def find_row(db: sqlite3.Connection, ident: Ident, slot_bytes: int) -> RecordInfo | None:
    """The row of one record, or None if there is none or it makes no sense."""
    sql = f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND key = ?"
    row = db.execute(sql, ident).fetchone()
    return None if row is None else _info(row, slot_bytes)


def read_counters(db: sqlite3.Connection) -> dict[str, int]:
    """The counters that outlive the process."""
    rows = db.execute("SELECT name, value FROM counters").fetchall()
    return {str(name): value for name, value in rows if isinstance(value, int)}


def _unreadable_message(error: UnicodeDecodeError) -> sqlite3.DatabaseError:
    # The message quotes a damaged name of the schema, and Python cannot decode it.
    return sqlite3.DatabaseError(f"damaged schema: {error.object!r}")


def _text(data: bytes) -> str:
    # A flipped bit in a text must not turn reading its row into an error.
    return data.decode(errors="replace")


def _info(row: tuple[Any, ...], slot_bytes: int) -> RecordInfo | None:
    """A row as a record; None if a field has an impossible value."""
    kind, key, root, parent, start, tokens, depth, size, slots, used, problem = row
    numbers = (start, tokens, depth, size, used)
    names = (key, root, parent)
    sound = (
        kind in _KINDS
        and all(isinstance(name, bytes) and len(name) == KEY_BYTES for name in names)
        and all(isinstance(number, int) and 0 <= number < 1 << 63 for number in numbers)
        and isinstance(slots, bytes)
        and len(slots) % 4 == 0
        and (problem is None or isinstance(problem, str))
    )
    if not sound:
        return None
    try:
        count = slots_for(size, slot_bytes)
    except UsageError:
        return None
    if len(slots) != 4 * count:
        return None
    return RecordInfo(
        kind=RecordKind(kind), root=root, key=key, parent=parent, start=start, tokens=tokens,
        depth=depth, payload_bytes=size, slots=struct.unpack(f"<{count}I", slots), used=used,
        problem=problem,
    )  # fmt: skip
