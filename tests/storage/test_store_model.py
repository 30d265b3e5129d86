"""Random histories of a small, often full store, against a dictionary of what was ever stored."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_cases import (
    chain,
    disk_bytes,
    every_record_is_right,
    found,
    open_store,
    record,
    window,
)

from cedar.cache.store_records import Record

LIMIT = 400_000  # about 40 slots


class StoreAgainstModel(RuleBasedStateMachine):
    """Sequences of 12 blocks compete for room; every answer is right and every miss is explained."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(
            tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.store = open_store(self.directory, limit=LIMIT)
        self.put: dict[bytes, Record] = {}
        self.evicted = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(number=st.integers(0, 5), length=st.integers(1, 12), depth=st.integers(0, 1))
    def put_chain(self, number: int, length: int, depth: int) -> None:
        records = chain(number, length, depth=depth)
        self.store.put_many(records)
        for r in records:
            self.put[r.key] = r
        there = self.store.contains_many([r.key for r in records])
        # A put that is given room keeps everything; it never eats its own head.
        assert there == sorted(there, reverse=True)
        assert all(there)

    @rule(number=st.integers(0, 5), position=st.integers(0, 11))
    def put_window(self, number: int, position: int) -> None:
        state = window(number, position)
        stored = self.store.put_many([state])
        self.put[state.key] = state
        if not self.store.contains_many([record(number, position).key])[0]:
            assert stored == 0

    @rule(number=st.integers(0, 5))
    def read_chain(self, number: int) -> None:
        hits = found(self.store, chain(number, 12))
        assert hits == sorted(hits, reverse=True), "a block is stored and one before it is not"

    @rule(number=st.integers(0, 5), position=st.integers(0, 11))
    def delete_the_end(self, number: int, position: int) -> None:
        names = [record(number, i).key for i in range(position, 12)]
        names_of_windows = [window(number, i).key for i in range(position, 12)]
        self.store.delete(names_of_windows, kind=window(number, 0).kind)
        self.store.delete(names)
        assert self.store.contains_many(names) == [False] * len(names)

    @rule()
    def reopen(self) -> None:
        before = [(info.ident, info.depth) for info in self.store.ls()]
        self.store.close()
        self.store = open_store(self.directory, limit=LIMIT)
        assert [(info.ident, info.depth) for info in self.store.ls()] == before

    @rule()
    def collect(self) -> None:
        before = self.store.stats().slots_used
        assert self.store.gc() == 0
        assert self.store.stats().slots_used == before

    @invariant()
    def holds(self) -> None:
        assert disk_bytes(self.directory) <= LIMIT
        assert not self.store.stats().reasons("error")
        assert not self.store.stats().reasons("set_aside")
        every_record_is_right(self.store)
        for info in self.store.ls():
            assert info.depth == self.put[info.key].depth or info.depth == 0


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=18, stateful_step_count=15, deadline=None, derandomize=True
)
