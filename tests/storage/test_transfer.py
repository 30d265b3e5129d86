"""Pins the way of a block from the pool to the disk and back, and the bytes it takes there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from store_cases import ROOT, chain, disk_bytes, failure, names, record, window

from cedar.cache.hashing import block_keys, chain_start
from cedar.cache.kv_pool import KVPool
from cedar.cache.store import PrefixStore
from cedar.cache.store_files import FileSystem
from cedar.cache.store_format import RecordKind, slot_bytes_for
from cedar.cache.store_reader import PrefixReader
from cedar.cache.store_records import Record
from cedar.cache.transfer import StoreWriter, block_payload, load_payload, load_prefix
from cedar.config.presets import preset
from cedar.errors import UsageError
from cedar.formats.rows import RowFormats

BLOCK = 8
LENGTH = 6
KEYS = block_keys(ROOT, range(LENGTH * BLOCK), BLOCK)
START = chain_start(ROOT)


def new_pool(name: str = "tiny", block_size: int = BLOCK, num_blocks: int = LENGTH) -> KVPool:
    config = preset(name)
    return KVPool(config.plan, RowFormats.of(config), num_blocks=num_blocks, block_size=block_size)


def filled(pool: KVPool) -> KVPool:
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.main.values(), *pool.index.values()):
        buffer.random_(0, 256, generator=generator)
    return pool


def equal(a: KVPool, b: KVPool, blocks: Sequence[int]) -> bool:
    return all(block_payload(a, block) == block_payload(b, block) for block in blocks)


def new_store(directory: Path, pool: KVPool, files: FileSystem | None = None) -> PrefixStore:
    return PrefixStore(
        directory, root=ROOT, limit_bytes=4_000_000, record_bytes=pool.block_bytes, files=files
    )


@pytest.fixture
def pool() -> KVPool:
    return filled(new_pool())


@pytest.fixture
def store(fast_path: Path, pool: KVPool) -> Iterator[PrefixStore]:
    with new_store(fast_path, pool) as opened:
        yield opened


@pytest.mark.parametrize("name", ["tiny", "tiny-article", "tiny-40"])
def test_a_payload_is_main_rows_then_index_keys_of_each_owner_in_order(name: str) -> None:
    pool = filled(new_pool(name))
    payload = block_payload(pool, 2)
    assert len(payload) == pool.block_bytes
    at = 0
    for owner in sorted(pool.main):
        per_block = pool.rows_per_block[owner]
        for buffer in (pool.main[owner], pool.index[owner]):
            for row in range(2 * per_block, 3 * per_block):
                data = bytes(buffer[row].tolist())
                assert payload[at : at + len(data)] == data
                at += len(data)
    assert at == len(payload)


def test_a_loaded_block_is_equal_and_its_neighbours_are_untouched(pool: KVPool) -> None:
    other = new_pool()
    load_payload(other, 3, block_payload(pool, 3))
    assert equal(other, pool, [3])
    assert equal(other, new_pool(), [0, 1, 2, 4, 5])


def test_a_payload_of_another_plan_is_refused(pool: KVPool) -> None:
    with pytest.raises(UsageError, match="a block of this pool has"):
        load_payload(pool, 0, bytes(pool.block_bytes - 1))
    with pytest.raises(UsageError, match=r"allowed 0\.\.5"):
        block_payload(pool, LENGTH)


def test_the_bytes_of_a_block_are_those_of_the_ledger() -> None:
    for name, block in (("tiny", 8), ("article", 128), ("v4.1-flash", 128)):
        config = preset(name)
        pool = new_pool(name, block_size=block, num_blocks=1)
        assert pool.block_bytes == RowFormats.of(config).kv_bytes(config.plan, block)


def test_a_sequence_comes_back_after_a_restart(fast_path: Path, pool: KVPool) -> None:
    with new_store(fast_path, pool) as store:
        writer = StoreWriter(store)
        assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == LENGTH
        writer.close()
    other = new_pool()
    blocks = [5, 3, 1, 0, 2, 4]
    with new_store(fast_path, pool) as store:
        assert load_prefix(store, other, KEYS, blocks) == [0] * LENGTH
        assert store.stats().counts["loaded_bytes"] == LENGTH * pool.block_bytes
    for i, block in enumerate(blocks):
        assert block_payload(other, block) == block_payload(pool, i)
    with PrefixReader(fast_path, root=ROOT) as reader:
        assert load_prefix(reader, other, KEYS, range(LENGTH)) == [0] * LENGTH
    assert equal(other, pool, range(LENGTH))


def test_a_prefix_ends_at_the_first_block_that_is_absent_or_too_deep(
    store: PrefixStore, pool: KVPool
) -> None:
    writer = StoreWriter(store)
    writer.submit_chain(pool, START, KEYS[:5], range(5), [0, 0, 0, 1, 1])
    writer.close()
    assert load_prefix(store, new_pool(), KEYS, range(LENGTH)) == [0, 0, 0, 1, 1]
    assert load_prefix(store, new_pool(), KEYS, range(LENGTH), max_depth=0) == [0, 0, 0]
    store.delete([KEYS[1]])
    assert load_prefix(store, new_pool(), KEYS, range(LENGTH)) == [0]
    assert load_prefix(store, new_pool(), [], []) == []


def test_rows_are_copied_when_submitted(store: PrefixStore, pool: KVPool) -> None:
    before = block_payload(pool, 0)
    writer = StoreWriter(store)
    writer.submit_chain(pool, START, KEYS[:1], [0], [0])
    load_payload(pool, 0, bytes(pool.block_bytes))
    writer.close()
    (hit,) = store.get_many(KEYS[:1])
    assert hit is not None
    assert bytes(hit.payload) == before


def test_only_what_the_store_lacks_is_copied(store: PrefixStore, pool: KVPool) -> None:
    writer = StoreWriter(store)
    assert writer.submit_chain(pool, START, KEYS[:3], range(3), [0] * 3) == 3
    assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 3
    assert writer.flush(10)
    assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 0
    # An evicted end heals, rows of a smaller depth replace deeper ones.
    store.delete(KEYS[4:])
    assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * 5 + [1]) == 2
    assert writer.flush(10)
    assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 1
    writer.close()
    assert store.contains_many(KEYS, max_depth=0) == [True] * LENGTH
    assert store.stats().reasons("dropped") == {}


def test_a_prefix_used_from_memory_stays_on_disk(fast_path: Path, pool: KVPool) -> None:
    with PrefixStore(
        fast_path, root=ROOT, limit_bytes=400_000, record_bytes=pool.block_bytes
    ) as store:
        writer = StoreWriter(store)
        writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH)
        assert writer.flush(10)
        capacity = store.stats().slots
        assert capacity is not None
        store.put_many(chain(1, capacity - LENGTH))
        # The scheduler found all of it in RAM: nothing to write, but a use.
        assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 0
        store.put_many(chain(2, 5))
        assert store.contains_many(KEYS) == [True] * LENGTH
        writer.close()


class StuckFiles(FileSystem):
    """Writes wait until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()

    def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self.reached.set()
        assert self.go.wait(30)
        return super().write_at(fd, parts, offset)


def test_a_slow_disk_costs_records_and_no_time(fast_path: Path, pool: KVPool) -> None:
    files = StuckFiles()
    with new_store(fast_path, pool, files) as store:
        writer = StoreWriter(store, max_queue_bytes=3 * pool.block_bytes)
        assert writer.submit_chain(pool, START, KEYS[:1], [0], [0]) == 1
        assert files.reached.wait(30)
        begin = time.monotonic()
        assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 2
        assert writer.dropped == 3
        # Lookups do not wait for the disk either.
        assert store.contains_many(KEYS[:1]) == [False]
        assert store.get_many(KEYS[:1]) == [None]
        assert not writer.flush(0.01)
        assert time.monotonic() - begin < 10
        files.go.set()
        assert writer.flush(30)
        assert store.contains_many(KEYS) == [True] * 3 + [False] * 3
        assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 3
        writer.close()
        assert not writer.submit(record(0, 0))
        assert store.contains_many(KEYS) == [True] * LENGTH


def test_a_broken_disk_is_left_alone_for_a_while(fast_path: Path, pool: KVPool) -> None:
    class Broken(FileSystem):
        broken = True

        def sync(self, fd: int) -> None:
            if self.broken:
                raise failure("sync", "EIO")
            super().sync(fd)

    files = Broken()
    with new_store(fast_path, pool, files) as store:
        writer = StoreWriter(store, rest_seconds=0.2)
        writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH)
        assert writer.flush(10)
        # The thread may meet the broken disk while the chain is still being handed over.
        before = writer.dropped
        assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == 0
        assert writer.dropped - before == LENGTH
        files.broken = False
        time.sleep(0.25)
        assert writer.submit_chain(pool, START, KEYS, range(LENGTH), [0] * LENGTH) == LENGTH
        writer.close()
        assert store.contains_many(KEYS) == [True] * LENGTH


def test_the_thread_outlives_a_record_it_cannot_store(
    store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = StoreWriter(store, rest_seconds=0)
    writer.submit(Record(key=b"short", parent=ROOT, start=0, tokens=1, payload=b""))
    assert writer.flush(10)
    assert "storing 1 records failed" in caplog.text
    writer.submit(record(0, 0))
    writer.close()
    assert store.contains_many([record(0, 0).key]) == [True]


def test_window_states_are_stored_by_the_same_thread(store: PrefixStore) -> None:
    writer = StoreWriter(store)
    assert writer.submit(record(0, 0))
    assert writer.submit(window(0, 0))
    writer.close()
    (hit,) = store.get_many(names([window(0, 0)]), kind=RecordKind.WINDOW)
    assert hit is not None
    assert bytes(hit.payload) == window(0, 0).payload


def test_bytes_on_disk_are_the_ledgers_bytes_and_the_stated_overhead(fast_path: Path) -> None:
    # docs/prefix-cache.md states it: 164 bytes of header, up to the next multiple of 4096, and an
    # index of at most 320 bytes a record and twelve pages.
    config = preset("article")
    pool = filled(new_pool("article", block_size=128, num_blocks=24))
    keys = block_keys(ROOT, range(24 * 128), 128)
    with PrefixStore(
        fast_path, root=ROOT, limit_bytes=64 << 20, record_bytes=pool.block_bytes
    ) as store:
        writer = StoreWriter(store)
        writer.submit_chain(pool, chain_start(ROOT), keys, range(24), [0] * 24)
        writer.close()
    ledger = RowFormats.of(config).kv_bytes(config.plan, 24 * 128)
    assert ledger == 24 * 113_920
    slab = sum(path.stat().st_size for path in fast_path.glob("*.slab"))
    assert slab == 24 * slot_bytes_for(pool.block_bytes) == 24 * 114_688
    assert disk_bytes(fast_path) - slab <= 24 * 320 + 12 * 4096 + 4096
    assert disk_bytes(fast_path) <= 1.03 * ledger


def test_a_conversation_takes_an_eighth_of_a_store_with_windows_and_unshared_rows(
    fast_path: Path,
) -> None:
    # Two turns of 1,500 tokens with the article's plan and row widths; windows are stored at the
    # end of each prompt and of each answer. Both sides are measured as files.
    config = preset("article")
    tokens, turns = 3000, 2

    def stored(unshared: bool) -> int:
        directory = fast_path / str(unshared)
        plan = config.variant(ced=True, csa2=False).plan if unshared else config.plan
        formats = RowFormats.of(config)
        pool = filled(KVPool(plan, formats, num_blocks=tokens // 128, block_size=128))
        keys = block_keys(ROOT, range(tokens), 128)
        with PrefixStore(
            directory, root=ROOT, limit_bytes=64 << 20, record_bytes=pool.block_bytes
        ) as store:
            writer = StoreWriter(store)
            writer.submit_chain(pool, START, keys, range(len(keys)), [0] * len(keys))
            for i in range(2 * turns if unshared else 0):
                at = (i + 1) * len(keys) // (2 * turns) - 1
                state = Record(
                    key=keys[at], parent=keys[at], start=128 * (at + 1), tokens=0,
                    payload=bytes(formats.window_bytes(plan)), kind=RecordKind.WINDOW,
                )  # fmt: skip
                assert writer.submit(state)
            writer.close()
            assert store.stats().records == len(keys) + (2 * turns if unshared else 0)
        return disk_bytes(directory)

    assert stored(False) * 8 <= stored(True)
