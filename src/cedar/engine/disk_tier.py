"""`DiskTier`: the prefix store as the engine sees it, blocks of the pool in and out.

Joins the pool's buffers with the store and its writing thread. Called by `prefix_reuse.py` through the
`BlockTier` protocol; made by `Engine` when a store is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from cedar.cache.kv_pool import KVPool
from cedar.cache.store import PrefixStore
from cedar.cache.store_format import RecordKind
from cedar.cache.store_records import Record
from cedar.cache.transfer import StoreWriter, load_prefix
from cedar.engine.engine_status import DiskStats


class DiskTier:
    """Blocks on disk.

    Args:
        pool: buffers that blocks are read into and copied from.
        store: open for writing; closed by `close`.
    """

    def __init__(self, pool: KVPool, store: PrefixStore) -> None:
        self._pool, self.store = pool, store
        self.writer = StoreWriter(store)
        self._lookups = self._hits = 0

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
        self._lookups += 1
        return there.index(False) if False in there else len(there)

    def load(
        self, keys: Sequence[bytes], blocks: Sequence[int], max_depth: int | None
    ) -> list[int]:
        """Fill blocks; the replay depths of the leading ones that were filled, whole and verified."""
        depths = load_prefix(self.store, self._pool, keys, blocks, max_depth)
        self._hits += bool(depths)
        return depths

    def save(
        self, start_key: bytes, keys: Sequence[bytes], blocks: Sequence[int], depths: Sequence[int]
    ) -> None:
        """Copy what the store lacks of a sequence; another thread writes it."""
        self.writer.submit_chain(self._pool, start_key, keys, blocks, depths)

    def load_windows(
        self, keys: Sequence[bytes], max_depth: int | None
    ) -> tuple[int, int, bytes] | None:
        """The windows at the end of the last of some blocks that has any: its index, the replay depth
        of the windows, the payload."""
        there = self.store.contains_many(keys, kind=RecordKind.WINDOW, max_depth=max_depth)
        for number in reversed([i for i, found in enumerate(there) if found]):
            (hit,) = self.store.get_many(
                [keys[number]], kind=RecordKind.WINDOW, max_depth=max_depth
            )
            if hit is not None:
                return number, hit.info.depth, bytes(hit.payload)
        return None

    def save_windows(self, key: bytes, position: int, depth: int, payload: bytes) -> None:
        """Store the windows at the end of a block, unless they are there; give the blocks first."""
        if self.store.contains_many([key], kind=RecordKind.WINDOW, max_depth=depth)[0]:
            self.store.touch([key], RecordKind.WINDOW)
            return
        self.writer.submit(
            Record(
                key=key, parent=key, start=position, tokens=0, depth=depth, payload=payload,
                kind=RecordKind.WINDOW,
            )
        )  # fmt: skip

    def stats(self) -> DiskStats:
        """Sizes and counts; any thread may ask."""
        stats = self.store.stats()
        assert stats.limit_bytes is not None
        dropped = stats.reasons("dropped")
        if self.writer.dropped:
            dropped["queue"] = self.writer.dropped
        counts = stats.counts
        return DiskStats(
            limit_bytes=stats.limit_bytes, bytes_on_disk=stats.bytes_on_disk,
            records=stats.records,
            records_set_aside=stats.records_set_aside, lookups=self._lookups, hits=self._hits,
            read_bytes=counts.get("loaded_bytes", 0), written_bytes=counts.get("stored_bytes", 0),
            written=counts.get("stored_records", 0), evicted=counts.get("evicted", 0),
            dropped=dropped, misses=stats.reasons("miss"), damaged=stats.reasons("set_aside"),
            errors=stats.reasons("error"),
        )  # fmt: skip

    def close(self) -> None:
        """Write what is queued, then close the store."""
        self.writer.close()
        self.store.close()
