"""Pins the block accounting: against a slow model, over random histories, and in named cases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cedar.cache.block_pool import BlockPool
from cedar.errors import UsageError


def keyed(pool: BlockPool, names: str) -> list[int]:
    """Allocate and publish one block per letter, in sequence order."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        assert pool.publish(block, name.encode()) == block
    return blocks


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_released_block_with_a_key_is_still_found() -> None:
    pool = BlockPool(4)
    blocks = keyed(pool, "ab")
    pool.release(blocks)
    assert pool.longest_prefix(keys("abc")) == blocks
    assert pool.num_free == 4


def test_the_hit_stops_at_the_first_miss() -> None:
    pool = BlockPool(4)
    a, b, c = keyed(pool, "abc")
    assert pool.longest_prefix(keys("abxc")) == [a, b]
    assert pool.longest_prefix(keys("xabc")) == []
    assert pool.lookup(b"c") == c


def test_blocks_without_a_key_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = keyed(pool, "ab")
    private = pool.allocate(2) or []
    pool.release(cached)
    pool.release(private)
    assert sorted(pool.allocate(2) or []) == sorted(private)
    assert pool.longest_prefix(keys("ab")) == cached


def test_the_tail_of_the_oldest_sequence_is_evicted_first() -> None:
    pool = BlockPool(6)
    old, new = keyed(pool, "abc"), keyed(pool, "xyz")
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[2]]
    assert pool.longest_prefix(keys("abc")) == old[:2]
    assert pool.allocate(3) == [old[1], old[0], new[2]]
    assert pool.longest_prefix(keys("xyz")) == new[:2]
    assert pool.stats().evicted == 4


def test_adopting_a_prefix_saves_it_from_eviction() -> None:
    pool = BlockPool(4)
    blocks = keyed(pool, "ab")
    pool.release(blocks)
    for block in blocks:
        pool.acquire(block)
    assert pool.allocate(3) is None
    assert len(pool.allocate(2) or []) == 2
    pool.release(blocks)
    assert pool.longest_prefix(keys("ab")) == blocks


def test_a_shared_block_stays_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(1)
    blocks = keyed(pool, "a")
    pool.acquire(blocks[0])
    pool.release(blocks)
    assert pool.allocate(1) is None
    pool.release(blocks)
    assert pool.allocate(1) == blocks
    assert pool.lookup(b"a") is None


def test_the_second_block_of_a_key_stays_private_and_names_the_first() -> None:
    pool = BlockPool(2)
    (first,) = keyed(pool, "a")
    (second,) = pool.allocate(1) or []
    assert pool.publish(second, b"a") == first
    pool.release([second])
    assert pool.stats().free == 1


def test_rows_of_smaller_replay_depth_replace_deeper_ones() -> None:
    pool = BlockPool(3)
    deep, exact = pool.allocate(2) or []
    pool.publish(deep, b"a", depth=2)
    assert pool.longest_prefix([b"a"], max_depth=0) == []
    assert pool.lookup(b"a", max_depth=2) == deep
    assert pool.publish(exact, b"a", depth=0) == exact
    assert pool.longest_prefix([b"a"], max_depth=0) == [exact]
    assert pool.depth_of(exact) == 0
    pool.release([deep, exact])
    pool.check_integrity()
    assert pool.stats().cached == 1


def test_forgetting_all_keys_keeps_held_blocks_held() -> None:
    pool = BlockPool(3)
    held, released = keyed(pool, "ab")
    pool.release([released])
    pool.forget_all()
    assert pool.longest_prefix(keys("ab")) == []
    assert pool.num_free == 2
    pool.release([held])
    pool.check_integrity()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.release([0]), "0 references"),
        (lambda pool: pool.acquire(0), "is free"),
        (lambda pool: pool.publish(0, b"k"), "no references"),
        (lambda pool: pool.depth_of(0), "not published"),
        (lambda pool: pool.acquire(7), "allowed 0..1"),
        (lambda pool: pool.allocate(-1), "negative"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(call, message) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(2)
    with pytest.raises(UsageError, match=message):
        call(pool)
    pool.check_integrity()
    assert pool.stats() == BlockPool(2).stats()


def test_a_release_that_goes_too_far_releases_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    with pytest.raises(UsageError):
        pool.release([block, block])
    assert pool.stats().held == 1


class PoolAgainstModel(RuleBasedStateMachine):
    """Random histories against a model that keeps plain lists and searches them."""

    SIZE = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.holders: list[list[int]] = []  # one entry per sequence: its references
        self.key: dict[int, tuple[bytes, int]] = {}
        self.order: list[int] = []  # cached blocks, next victim first

    def held(self) -> set[int]:
        return {block for blocks in self.holders for block in blocks}

    @rule(count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> None:
        free = set(range(self.SIZE)) - self.held() - set(self.order)
        got = self.pool.allocate(count)
        if count > len(free) + len(self.order):
            assert got is None
            return
        assert got is not None
        fresh, victims = got[: len(free)], got[len(free) :]
        assert set(fresh) <= free
        assert victims == self.order[: len(victims)]
        del self.order[: len(victims)]
        for block in victims:
            del self.key[block]
        self.holders.append(got)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        for i in range(len(blocks) - 1, -1, -1):
            gone = blocks[i] not in self.held() and blocks[i] not in blocks[:i]
            if gone and blocks[i] in self.key:
                self.order.append(blocks[i])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]), depth=st.integers(0, 2))
    def publish(self, data: st.DataObject, name: bytes, depth: int) -> None:
        blocks = [b for b in sorted(self.held()) if b not in self.key or self.key[b][0] == name]
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        earlier = [b for b, (key, _) in self.key.items() if key == name]
        got = self.pool.publish(block, name, depth)
        if earlier and self.key[earlier[0]][1] <= depth:
            assert got == earlier[0]
            return
        for b in earlier:
            del self.key[b]
            if b in self.order:
                self.order.remove(b)
        self.key[block] = (name, depth)
        assert got == block

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=5),
          max_depth=st.sampled_from([None, 0, 1]))  # fmt: skip
    def adopt(self, names: list[bytes], max_depth: int | None) -> None:
        expected = []
        for name in names:
            found = [
                b for b, (key, depth) in self.key.items()
                if key == name and (max_depth is None or depth <= max_depth)
            ]  # fmt: skip
            if not found:
                break
            expected += found
        got = self.pool.longest_prefix(names, max_depth)
        assert got == expected
        for block in got:
            self.pool.acquire(block)
            if block in self.order:
                self.order.remove(block)
        self.holders.append(got)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        stats = self.pool.stats()
        held = self.held()
        assert stats.cached == len(self.order)
        assert stats.shared == len(held & self.key.keys())
        assert stats.held == len(held - self.key.keys())
        assert stats.free + stats.cached + stats.shared + stats.held == self.SIZE
        assert self.pool.num_free == stats.free + stats.cached


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
