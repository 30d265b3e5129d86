"""Accounting of KV blocks: who holds which block id, and which full block is findable by its key.

Pure Python: knows ids, reference counts, keys and eviction order, and no tensors, tokens or files.
The rows themselves are in `kv_pool.py`, the keys come from `hashing.py`. Called by the scheduler.

A block is in exactly one of four states:

    free         no reference, no key      allocated first
    cached       no reference, a key       findable; allocated last, least recently released first
    held         references, no key        private to its sequences
    shared       references and a key      findable; never evicted

"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cedar.errors import UsageError


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks by state, and what happened since the pool was made.

    Attributes:
        num_blocks: capacity.
        free, cached, held, shared: blocks in each state; they add up to `num_blocks`.
        allocated: blocks handed out by `allocate`.
        published: keys that became findable.
        evicted: cached blocks that lost their key because their memory was needed.
        adopted: blocks taken over by `acquire`.
    """

    num_blocks: int
    free: int
    cached: int
    held: int
    shared: int
    allocated: int
    published: int
    evicted: int
    adopted: int


class BlockPool:
    """Reference-counted block ids with a prefix cache over full blocks.

    Not thread-safe: the scheduler owns it.

    Args:
        num_blocks: block ids are 0 .. num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise UsageError(f"num_blocks={num_blocks} must not be negative")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # next victim first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, tuple[bytes, int]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, each with one reference; all of them or none.

        Free blocks go first; then cached blocks lose their key, the least recently released first
        and within one sequence the tail first.

        Returns:
            Block ids, or None if fewer than `count` blocks are free or cached.
        """
        if count < 0:
            raise UsageError(f"allocate({count}): the count must not be negative")
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self._counts["evicted"] += 1
            self._references[block] = 1
            taken.append(block)
        self._counts["allocated"] += count
        return taken

    def acquire(self, block: int) -> None:
        """Add a reference to a held or findable block, so that it stays until it is released.

        Raises:
            UsageError: the block is free: its rows belong to nobody.
        """
        self._check_id(block)
        if not self._references[block]:
            if block not in self._key_of:
                raise UsageError(f"acquire({block}): the block is free; allocate it first")
            del self._cached[block]
        self._references[block] += 1
        self._counts["adopted"] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference per entry. Give the blocks of one sequence in sequence order.

        A block without references becomes cached if it has a key and free if not. Of one call the
        last block is the next victim: a prefix without its tail is still a prefix.

        Raises:
            UsageError: a block has fewer references than entries in `blocks`; nothing is released.
        """
        for block, count in Counter(blocks).items():
            self._check_id(block)
            if self._references[block] < count:
                raise UsageError(
                    f"release: block {block} has {self._references[block]} references, "
                    f"{count} would be dropped"
                )
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, key: bytes, depth: int = 0) -> int:
        """Make a full, held block findable.

        Args:
            block: a block with references whose rows are all written.
            key: its chain key.
            depth: bounded replays its rows descend from; 0 = as computed from the first token on.

        Returns:
            The block that is now found under `key`: `block`, or one that was published before with
            the same or a smaller depth. The caller may acquire that one and release its own.

        Raises:
            UsageError: the block is not held, or has another key.
        """
        self._check_id(block)
        if not self._references[block]:
            raise UsageError(f"publish: block {block} has no references")
        if depth < 0:
            raise UsageError(f"publish: depth={depth} must not be negative")
        known = self._key_of.get(block)
        if known is not None and known[0] != key:
            raise UsageError(f"publish: block {block} is already published under another key")
        earlier = self._by_key.get(key)
        if earlier is not None:
            if self._key_of[earlier][1] <= depth:
                return earlier
            if earlier != block:
                self._withdraw(earlier)
        self._by_key[key] = block
        self._key_of[block] = (key, depth)
        self._counts["published"] += 1
        return block

    def lookup(self, key: bytes, max_depth: int | None = None) -> int | None:
        """The block published under `key`, or None.

        Args:
            key: a chain key.
            max_depth: ignore a block whose replay depth is greater; None = any.
        """
        block = self._by_key.get(key)
        if block is None or (max_depth is not None and self._key_of[block][1] > max_depth):
            return None
        return block

    def longest_prefix(self, keys: Sequence[bytes], max_depth: int | None = None) -> list[int]:
        """Blocks of the leading keys, up to the first that is not found. Takes no references."""
        found = []
        for key in keys:
            block = self.lookup(key, max_depth)
            if block is None:
                break
            found.append(block)
        return found

    def depth_of(self, block: int) -> int:
        """Replay depth a findable block was published with.

        Raises:
            UsageError: the block is not findable.
        """
        if block not in self._key_of:
            raise UsageError(f"depth_of({block}): the block is not published")
        return self._key_of[block][1]

    def forget_all(self) -> None:
        """Withdraw every key: nothing is found until it is published again. Holders keep blocks."""
        for block in list(self._key_of):
            self._withdraw(block)

    def stats(self) -> PoolStats:
        """Blocks by state and counters since construction."""
        referenced = sum(1 for count in self._references if count)
        shared = len(self._key_of) - len(self._cached)
        return PoolStats(
            num_blocks=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            held=referenced - shared,
            shared=shared,
            allocated=self._counts["allocated"],
            published=self._counts["published"],
            evicted=self._counts["evicted"],
            adopted=self._counts["adopted"],
        )

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that keys and blocks agree.

        Raises:
            AssertionError: names the first block that is not.
        """
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, count in enumerate(self._references):
            states = (count > 0) + (block in free) + (block in cached)
            assert count >= 0, f"block {block}: {count} references"
            assert states == 1, f"block {block} is in {states} states"
            keyed = block in self._key_of
            assert not (block in free and keyed), f"block {block} is free and has a key"
            assert keyed or block not in cached, f"block {block} is cached without a key"
        pairs = {block: key for key, block in self._by_key.items()}
        assert len(pairs) == len(self._by_key), "two keys name one block"
        assert pairs == {block: key for block, (key, _) in self._key_of.items()}, "keys disagree"

    def _forget(self, block: int) -> None:
        key, _ = self._key_of.pop(block)
        del self._by_key[key]

    def _withdraw(self, block: int) -> None:
        self._forget(block)
        if not self._references[block]:
            del self._cached[block]
            self._free.append(block)

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise UsageError(f"block {block} is not in this pool: allowed 0..{self.num_blocks - 1}")
