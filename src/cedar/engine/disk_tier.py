"""`DiskTier`: the prefix store as the engine sees it, blocks of the pool in and out.

Joins the pool's buffers with the store and its writing thread. Called by `prefix_reuse.py` through the
`BlockTier` protocol; made by `Engine` when a store is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from cedar.cache.kv_pool import KVPool
from cedar.cache.store import PrefixStore
from cedar.cache.transfer import StoreWriter, load_prefix


class DiskTier:
    """Blocks on disk.

    Args:
        pool: buffers that blocks are read into and copied from.
        store: open for writing; closed by `close`.
    """

    def __init__(self, pool: KVPool, store: PrefixStore) -> None:
        self._pool, self.store = pool, store
        self.writer = StoreWriter(store)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def count_leading(self, keys: Sequence[bytes], max_depth: int | None) -> int:
        """How many leading blocks a `load` would try to read."""
        there = self.store.contains_many(keys, max_depth=max_depth)
        return there.index(False) if False in there else len(there)

    def load(
        self, keys: Sequence[bytes], blocks: Sequence[int], max_depth: int | None
    ) -> list[int]:
        """Fill blocks; the replay depths of the leading ones that were filled, whole and verified."""
        return load_prefix(self.store, self._pool, keys, blocks, max_depth)

    def save(
        self, start_key: bytes, keys: Sequence[bytes], blocks: Sequence[int], depths: Sequence[int]
    ) -> None:
        """Copy what the store lacks of a sequence; another thread writes it."""
        self.writer.submit_chain(self._pool, start_key, keys, blocks, depths)

    def close(self) -> None:
        """Write what is queued, then close the store."""
        self.writer.close()
        self.store.close()
