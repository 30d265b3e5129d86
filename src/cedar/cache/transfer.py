"""Blocks and windows as bytes, out of a state and back; and a thread that writes them to the store.

The payload of a block is, for every KV owner in ascending layer order,

    | its main rows of the block, first token first | its index keys, in the same order |

exactly as the pool holds them; `KVPool.block_bytes` long. The payload of a window state is, for the
leading layers in order, the ring of one sequence as it is: row of position p at p % window. Called by
the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from cedar.cache.kv_pool import KVPool
from cedar.cache.state import ModelState
from cedar.cache.store import PrefixStore
from cedar.cache.store_format import RecordKind
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_records import Bytes, Record, as_bytes
from cedar.cache.window_cache import Windows
from cedar.errors import UsageError

_LOG = logging.getLogger(__name__)

#: Records handed to the store at once: one sync for all of them.
_BATCH_RECORDS = 64
#: Blocks read from the store at once: bounds the copy in memory.
_READ_BLOCKS = 64


def block_payload(pool: KVPool, block_id: int) -> bytes:
    """A copy of the rows of one block, as stored."""
    return b"".join(rows.numpy().tobytes() for rows in _rows_of(pool, block_id))


def load_payload(pool: KVPool, block_id: int, buffer: Bytes) -> None:
    """Overwrite the rows of one block by a payload.

    Raises:
        UsageError: the payload has another length than a block of this pool.
    """
    data = as_bytes(buffer)
    if len(data) != pool.block_bytes:
        raise UsageError(
            f"a block of this pool has {pool.block_bytes} bytes, the payload has {len(data)}"
        )
    source = np.frombuffer(data, dtype=np.uint8)
    at = 0
    for rows in _rows_of(pool, block_id):
        target = rows.numpy().reshape(-1)
        target[:] = source[at : at + target.size]
        at += target.size


def load_prefix(
    store: PrefixStore | PrefixReader, pool: KVPool, keys: Sequence[bytes], blocks: Sequence[int],
    max_depth: int | None = None,
) -> list[int]:  # fmt: skip
    """Fill blocks from the store, up to the first record that is not there.

    Args:
        store: where the records are.
        pool: its blocks are filled.
        keys: chain keys, in sequence order.
        blocks: block ids for them, held by the caller.
        max_depth: greatest replay depth that is of use; None = any.

    Returns:
        The replay depths of the leading blocks that were filled, one each. What later blocks hold
        is undefined.
    """
    depths: list[int] = []
    if not keys:
        return depths
    buffers = [bytearray(pool.block_bytes) for _ in range(min(_READ_BLOCKS, len(keys)))]
    for start in range(0, len(keys), _READ_BLOCKS):
        wanted = keys[start : start + _READ_BLOCKS]
        hits = store.get_many(wanted, buffers[: len(wanted)], max_depth=max_depth)
        for block, hit in zip(blocks[start:], hits, strict=False):
            if hit is None:
                return depths
            load_payload(pool, block, hit.payload)
            depths.append(hit.info.depth)
    return depths


def window_payload(state: ModelState, slot: int, layers: int) -> bytes | None:
    """A copy of the windows of one sequence, as stored.

    Args:
        layers: how many, from the first.

    Returns:
        None while a window is not full of this sequence's own rows.
    """
    record, window = state.slots[slot], state.plan.sliding_window
    full = record.encoder_length - record.encoder_floor >= window
    if layers > state.plan.num_encoder_layers:
        full &= record.decoder_length - record.decoder_floor >= window
    return state.rings[:layers, slot].numpy().tobytes() if full else None


def copy_windows(state: ModelState, slot: int, layers: int, *, boundary: bool) -> Windows | None:
    """The windows of one sequence and, if asked for, its last boundary rows as far as there are any.

    Returns:
        None as `window_payload`.
    """
    rings, record = window_payload(state, slot, layers), state.slots[slot]
    if rings is None:
        return None
    # A stash is replaced and never written to, so it may be shared.
    return Windows(rings, record.stash_stream, record.stash_pre) if boundary else Windows(rings)


def load_windows(state: ModelState, slot: int, layers: int, windows: Windows) -> None:
    """Give a sequence that was placed at a position (`ForwardPass.rewind`) its windows there.

    Raises:
        UsageError: the payload has another length than the windows of these layers.
    """
    data, target = windows.rings, state.rings[:layers, slot]
    if len(data) != target.numel():
        raise UsageError(
            f"the windows of {layers} layers have {target.numel()} bytes, the payload has {len(data)}"
        )
    target.numpy()[:] = np.frombuffer(data, dtype=np.uint8).reshape(target.shape)
    record = state.slots[slot]
    record.encoder_floor = 0
    record.stash_stream, record.stash_pre = windows.stream, windows.pre
    if layers > state.plan.num_encoder_layers:
        record.decoder_floor = 0


class StoreWriter:
    """Stores records in a thread of its own.

    What is submitted is copied at once, so the caller may reuse its blocks. If the store cannot keep
    up, records are dropped and counted: a cache may forget, the engine must not wait. When the store
    takes nothing of a batch (disk full or broken, no room) nothing is copied for a while.

    Args:
        store: written to by nobody else meanwhile.
        max_queue_bytes: payloads that may wait.
        rest_seconds: pause after the store took nothing.
    """

    def __init__(
        self, store: PrefixStore, max_queue_bytes: int = 64 << 20, rest_seconds: float = 5.0
    ) -> None:
        self.store, self._limit, self._rest = store, max_queue_bytes, rest_seconds
        self._queue: deque[Record] = deque()
        self._queued_bytes = 0
        self._depths: dict[tuple[int, bytes], int] = {}  # of records queued or being written
        self._busy = self._closing = False
        self._resting_until = 0.0
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefix-store", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that were not queued: no room in the queue, store resting, or closed."""
        with self._changed:
            return self._dropped

    def submit(self, record: Record) -> bool:
        """Queue one record; its payload must not change any more.

        Returns:
            False if it was dropped.
        """
        size = len(as_bytes(record.payload))
        with self._changed:
            if not self._may_queue(size):
                self._dropped += 1
                return False
            self._queue.append(record)
            self._queued_bytes += size
            self._depths[record.kind, record.key] = record.depth
            self._changed.notify_all()
        return True

    def submit_chain(
        self, pool: KVPool, start_key: bytes, keys: Sequence[bytes], blocks: Sequence[int],
        depths: Sequence[int],
    ) -> int:  # fmt: skip
        """Queue what the store lacks of a sequence, and count a use of the rest.

        Give the whole sequence from token 0 on, also what was stored or found earlier: the store
        keeps a block only if it has the blocks before it, and may have evicted some.

        Args:
            pool: holds the rows.
            start_key: `hashing.chain_start`.
            keys, blocks, depths: key, block id and replay depth of every full block.

        Returns:
            How many blocks were copied and queued.
        """
        self.store.touch(keys)
        lacking = self._lacking(keys, depths)
        for done, i in enumerate(lacking):
            with self._changed:
                if not self._may_queue(pool.block_bytes):
                    # Those behind it could not be stored without it.
                    self._dropped += len(lacking) - done
                    return done
            self.submit(
                Record(
                    key=keys[i], parent=keys[i - 1] if i else start_key,
                    start=i * pool.block_size, tokens=pool.block_size, depth=depths[i],
                    payload=block_payload(pool, blocks[i]),
                )
            )  # fmt: skip
        return len(lacking)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted so far was stored or dropped by the store.

        Args:
            timeout: seconds; None = as long as it takes.

        Returns:
            False if the time was up first.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self) -> None:
        """Write what is queued and end the thread; the store stays open."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _may_queue(self, size: int) -> bool:
        resting = time.monotonic() < self._resting_until
        return not (self._closing or resting or self._queued_bytes + size > self._limit)

    def _lacking(self, keys: Sequence[bytes], depths: Sequence[int]) -> list[int]:
        """Indices of blocks that are neither stored nor queued with their depth or a smaller one."""
        there = [False] * len(keys)
        for depth in set(depths):
            same = [i for i, d in enumerate(depths) if d == depth]
            stored = self.store.contains_many([keys[i] for i in same], max_depth=depth)
            for i, found in zip(same, stored, strict=True):
                there[i] = found
        with self._changed:
            for i, key in enumerate(keys):
                queued = self._depths.get((RecordKind.GLOBAL, key))
                there[i] |= queued is not None and queued <= depths[i]
        return [i for i, found in enumerate(there) if not found]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                count = min(len(self._queue), _BATCH_RECORDS)
                batch = [self._queue.popleft() for _ in range(count)]
                self._busy = True
            took_some = self._store(batch)
            with self._changed:
                self._queued_bytes -= sum(len(as_bytes(record.payload)) for record in batch)
                for record in batch:
                    self._depths.pop((record.kind, record.key), None)
                if not took_some:
                    self._resting_until = time.monotonic() + self._rest

    def _store(self, batch: Sequence[Record]) -> bool:
        """Whether the store has any of the records now."""
        try:
            self.store.put_many(batch)
            return any(
                self.store.contains_many([record.key], kind=record.kind)[0] for record in batch
            )
        except Exception:
            # The thread must outlive a mistake in one record; the engine goes on without it.
            _LOG.exception("storing %d records failed", len(batch))
            return False


def _rows_of(pool: KVPool, block_id: int) -> Iterator[Tensor]:
    """The rows of one block in the order of its payload."""
    if not 0 <= block_id < pool.num_blocks:
        raise UsageError(f"block {block_id} is not in this pool: allowed 0..{pool.num_blocks - 1}")
    for owner in sorted(pool.rows_per_block):
        per_block = pool.rows_per_block[owner]
        for buffer in (pool.main[owner], pool.index[owner]):
            yield buffer[block_id * per_block : (block_id + 1) * per_block]
