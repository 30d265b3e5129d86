"""The slab: one data file of equal slots. Reads and writes whole records, checks what it reads.

Knows slots and checksums; which slots are free and which record is where is in `store_space.py` and
`store_index.py`. Called by the two stores.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from cedar.cache.store_files import FileSystem
from cedar.cache.store_format import (
    MAX_SLOTS,
    Problem,
    RecordInfo,
    check_record,
    decode_header,
    encode_header,
    header_bytes,
    padding_bytes,
)


class Slab:
    """An open slab file.

    Args:
        path: the file.   slot_bytes: size of a slot.   files: system calls.
        writable: whether to open for writing and create the file if it is absent.
    """

    def __init__(self, path: Path, slot_bytes: int, files: FileSystem, *, writable: bool) -> None:
        self.path, self.slot_bytes, self._files = path, slot_bytes, files
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._fd = files.open(path, flags | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def num_slots(self) -> int:
        """Whole slots in the file."""
        return os.fstat(self._fd).st_size // self.slot_bytes

    def resize(self, num_slots: int) -> None:
        """Cut the file after `num_slots`, or claim disk space up to there.

        Raises:
            OSError: the disk is full or broken; the file may have any length in between.
        """
        size = os.fstat(self._fd).st_size
        wanted = num_slots * self.slot_bytes
        if wanted < size:
            self._files.truncate(self._fd, wanted)
        elif wanted > size:
            self._files.allocate(self._fd, size, wanted - size)

    def write(self, info: RecordInfo, payload: memoryview) -> None:
        """Write a record into its slots; durable only after `sync`.

        Raises:
            OSError: also if the system keeps writing nothing.
        """
        padding = bytes(padding_bytes(info, self.slot_bytes))
        header = encode_header(info, self.slot_bytes, payload)
        parts = [memoryview(header), payload, memoryview(padding)]
        for offset, pieces in self._scatter(info.slots, parts):
            while pieces:
                done = self._files.write_at(self._fd, pieces, offset)
                if done <= 0:
                    raise OSError(errno.EIO, f"nothing was written at {offset} of {self.path}")
                offset += done
                pieces = _after(pieces, done)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        self._files.sync(self._fd)

    def will_need(self, info: RecordInfo) -> None:
        """Start reading a record in the background."""
        for first, count in runs_of(info.slots):
            self._files.will_need(self._fd, first * self.slot_bytes, count * self.slot_bytes)

    def read(self, info: RecordInfo, payload: memoryview) -> Problem | None:
        """Read a record's payload into a buffer of its size and check every byte of the record.

        Returns:
            None, or why the buffer holds nothing usable: "truncated", "damaged", "version",
            "foreign" or "io".
        """
        header = bytearray(header_bytes(len(info.slots)))
        padding = bytearray(padding_bytes(info, self.slot_bytes))
        parts = [memoryview(header), payload, memoryview(padding)]
        try:
            for offset, pieces in self._scatter(info.slots, parts):
                while pieces:
                    done = self._files.read_at(self._fd, pieces, offset)
                    if done <= 0:
                        return "truncated"
                    offset += done
                    pieces = _after(pieces, done)
        except OSError:
            return "io"
        return check_record(info, self.slot_bytes, bytes(header), payload, bytes(padding))

    def scan(self) -> Iterator[RecordInfo]:
        """All whole records in the file, found by their headers: for a lost index.

        A record that was deleted and not yet overwritten is found too; it is still what it says.
        """
        most = header_bytes(MAX_SLOTS)
        for slot in range(self.num_slots):
            header = bytearray(most)
            try:
                self._files.read_at(self._fd, [memoryview(header)], slot * self.slot_bytes)
            except OSError:
                continue
            info = decode_header(bytes(header), self.slot_bytes)
            if info is None or info.slots[0] != slot or len(set(info.slots)) != len(info.slots):
                continue
            if self.read(info, memoryview(bytearray(info.payload_bytes))) is None:
                yield info

    def _scatter(
        self, slots: tuple[int, ...], parts: list[memoryview]
    ) -> Iterator[tuple[int, list[memoryview]]]:
        """Cut the parts at the ends of runs of neighbouring slots: (file offset, parts)."""
        parts = [part for part in parts if len(part)]
        for first, count in runs_of(slots):
            room = count * self.slot_bytes
            pieces: list[memoryview] = []
            while parts and room:
                piece = parts[0][:room]
                pieces.append(piece)
                room -= len(piece)
                parts = _after(parts, len(piece))
            yield first * self.slot_bytes, pieces


def runs_of(slots: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighbouring slots taken together: (first slot, count)."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][0] + runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts without their first `count` bytes."""
    left = list(parts)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if left and count:
        left[0] = left[0][count:]
    return left
