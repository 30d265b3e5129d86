"""Index scoring, top-k and candidate pool of the native library against a plain numpy definition.

Everything is compared bit for bit, in every instruction-set variant this machine has: scores are
exact dot products followed by one fixed order of float32 operations, and ties have one winner.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.kernels.native import library

LIBRARY = Path(
    os.environ.get("NATIVE_LIBRARY_UNDER_TEST")
    or Path(library.__file__).with_name(library.library_name())
)
if not LIBRARY.is_file():
    pytest.skip("the native kernels are not built", allow_module_level=True)
NATIVE = ctypes.CDLL(str(LIBRARY))

ISAS = [n for n in ("scalar", "avx2", "avx512", "amx") if NATIVE.cedar_set_isa(n.encode()) == 0]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def decode(rows: Bytes, dim: int) -> npt.NDArray[np.float64]:
    """Index rows `[..., dim/2 + dim/32]` to values; the even element sits in the low nibble."""
    codes, scales = rows[..., : dim // 2], rows[..., dim // 2 :]
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], dim)
    return E2M1[nibbles] * np.repeat(np.ldexp(1.0, scales.astype(int) - 127), 32, axis=-1)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dim: int, spread: int) -> Bytes:
    """Random index rows whose scale exponents lie in `0..spread` above 2^-spread."""
    codes = rng.integers(0, 256, (*shape, dim // 2), dtype=np.uint8)
    scales = 127 - spread + rng.integers(0, spread + 1, (*shape, dim // 32))
    return np.concatenate((codes, scales.astype(np.uint8)), axis=-1)


@dataclass(frozen=True)
class Case:
    """One call. `keys[s]` are the rows of sequence s in order."""

    queries: Bytes  # [N, heads, row bytes]
    weights: Floats  # [N, heads]
    keys: Bytes  # [S, keys, row bytes]
    sequences: Ints
    visible: Ints
    dim: int
    topk: int
    rows_per_block: int = 8

    def scores(self, n: int) -> Floats:
        """Scores of the visible keys of query n, by the definition."""
        q = decode(self.queries[n], self.dim)
        k = decode(self.keys[self.sequences[n], : self.visible[n]], self.dim)
        dots = (q @ k.T).astype(np.float32)
        total = np.zeros(k.shape[0], np.float32)
        for head in range(q.shape[0]):
            total = total + self.weights[n, head] * np.maximum(dots[head], np.float32(0))
        return total


def best(scores: Floats, positions: Ints, count: int, width: int) -> Ints:
    """Positions of the `count` best scores, lowest position first among equals; ascending, padded."""
    order = np.lexsort((positions, -scores.astype(np.float64)))[:count]
    out = np.full(width, -1, np.int32)
    chosen = np.sort(positions[order])
    out[: len(chosen)] = chosen
    return out


def expected_topk(case: Case, pool: Ints | None = None, block: int = 1) -> Ints:
    out = np.full((len(case.visible), case.topk), -1, np.int32)
    for n, visible in enumerate(case.visible):
        positions = np.arange(visible, dtype=np.int32)
        if pool is not None:
            positions = positions[np.isin(positions // block, pool[n][pool[n] >= 0])]
        out[n] = best(case.scores(n)[positions], positions, case.topk, case.topk)
    return out


def expected_pool(case: Case, capacity: int, block: int) -> Ints:
    out = np.full((len(case.visible), capacity), -1, np.int32)
    for n, visible in enumerate(case.visible):
        if visible == 0:
            continue
        scores = case.scores(n)
        blocks = np.arange((visible - 1) // block + 1, dtype=np.int32)
        tops = np.array([scores[b * block : (b + 1) * block].max() for b in blocks], np.float32)
        tops[-1] = np.inf
        out[n] = best(tops, blocks, capacity, capacity)
    return out


def paged(case: Case, rng: np.random.Generator, gap: int = 0) -> tuple[Bytes, Ints]:
    """The keys in a shuffled pool. Rows no query sees hold 0xFF; rows have `gap` bytes between."""
    sequences, count, row_bytes = case.keys.shape
    blocks = -(-count // case.rows_per_block)
    pool = np.full(
        ((sequences * blocks + 3) * case.rows_per_block, row_bytes + gap), 0xFF, np.uint8
    )
    ids = rng.permutation(sequences * blocks + 3)[: sequences * blocks]
    tables = ids.reshape(sequences, blocks).astype(np.int32)
    for s in range(sequences):
        seen = int(max((v for v, q in zip(case.visible, case.sequences) if q == s), default=0))
        for j in range(seen):
            at = tables[s, j // case.rows_per_block] * case.rows_per_block + j % case.rows_per_block
            pool[at, :row_bytes] = case.keys[s, j]
        # Table entries behind the last seen block point nowhere.
        tables[s, -(-seen // case.rows_per_block) :] = 2**30
    return pool, tables


def address(array: npt.NDArray[np.generic] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def call(
    isa: str, case: Case, pool_rows: Bytes, tables: Ints, threads: int,
    pool: Ints | None = None, capacity: int = 0, block: int = 1,
) -> tuple[Ints, Ints]:  # fmt: skip
    """Run the library: the selection and, if `capacity`, the candidate pool."""
    assert NATIVE.cedar_set_isa(isa.encode()) == 0
    count, heads = case.weights.shape
    out = np.full((count, case.topk), -7, np.int32)
    pool_out = np.full((count, capacity), -7, np.int32) if capacity else None
    width = pool.shape[1] if pool is not None else capacity
    status = NATIVE.cedar_index_topk(
        address(np.ascontiguousarray(case.queries)), address(case.weights), address(pool_rows),
        ctypes.c_int64(pool_rows.shape[1]), address(tables), ctypes.c_int64(tables.shape[1]),
        case.rows_per_block, address(case.sequences), address(case.visible), count, heads, case.dim,
        case.topk, address(pool), address(pool_out), width, block, address(out), threads,
    )  # fmt: skip
    assert status == 0
    return out, pool_out if pool_out is not None else out


def make_case(
    seed: int, *, heads: int, dim: int, count: int, keys: int, topk: int, spread: int,
    sequences: int = 2, rows_per_block: int = 8, tie_pool: int = 0,
) -> Case:  # fmt: skip
    """A random case; with `tie_pool` keys repeat a few rows, so that equal scores abound."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, (sequences, keys), dim, spread)
    if tie_pool:
        rows = rows[:, rng.integers(0, min(tie_pool, keys), keys)]
    return Case(
        queries=random_rows(rng, (count, heads), dim, spread),
        weights=rng.standard_normal((count, heads)).astype(np.float32),
        keys=rows,
        sequences=np.sort(rng.integers(0, sequences, count)).astype(np.int32),
        visible=rng.integers(0, keys + 1, count).astype(np.int32),
        dim=dim, topk=topk, rows_per_block=rows_per_block,
    )  # fmt: skip


cases = st.builds(
    make_case,
    seed=st.integers(0, 2**32 - 1),
    heads=st.sampled_from([2, 3, 4, 8, 9, 16, 17, 32, 33]),
    dim=st.sampled_from([32, 64, 96, 128]),
    count=st.integers(1, 40),
    keys=st.integers(1, 700),
    topk=st.sampled_from([1, 7, 64, 300]),
    spread=st.sampled_from([0, 2, 3, 6, 17]),
    sequences=st.integers(1, 3),
    rows_per_block=st.sampled_from([1, 7, 8, 32, 128]),
    tie_pool=st.sampled_from([0, 0, 3]),
)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(case=cases, threads=st.integers(1, 3))
def test_the_selection_is_the_definition_bit_for_bit(isa: str, case: Case, threads: int) -> None:
    pool_rows, tables = paged(case, np.random.default_rng(1))
    got, _ = call(isa, case, pool_rows, tables, threads)
    np.testing.assert_array_equal(got, expected_topk(case))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(
    case=cases,
    capacity=st.sampled_from([1, 5, 40]),
    block=st.sampled_from([1, 3, 8]),
    threads=st.integers(1, 2),
)
def test_the_candidate_pool_keeps_the_best_blocks_and_the_newest(
    isa: str, case: Case, capacity: int, block: int, threads: int
) -> None:
    pool_rows, tables = paged(case, np.random.default_rng(2))
    got, pool = call(isa, case, pool_rows, tables, threads, capacity=capacity, block=block)
    np.testing.assert_array_equal(got, expected_topk(case))
    np.testing.assert_array_equal(pool, expected_pool(case, capacity, block))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(case=cases, block=st.sampled_from([1, 3, 8]), seed=st.integers(0, 999))
def test_only_candidates_are_selected_and_read(isa: str, case: Case, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = -(-case.keys.shape[1] // block)
    pool = np.full((len(case.visible), 12), -1, np.int32)
    for row in pool:
        chosen = np.sort(rng.choice(total, min(total, int(rng.integers(0, 10))), replace=False))
        row[: len(chosen)] = chosen
    # Keys outside every pool are poisoned: reading them as keys would change plain strips to others.
    poisoned = case.keys.copy()
    for s in range(case.keys.shape[0]):
        used = np.isin(np.arange(case.keys.shape[1]) // block, pool[case.sequences == s])
        poisoned[s, ~used] = 0xFF
    pool_rows, tables = paged(replace(case, keys=poisoned), rng)
    got, _ = call(isa, case, pool_rows, tables, 2, pool=pool, block=block)
    np.testing.assert_array_equal(got, expected_topk(case, pool, block))


@pytest.mark.parametrize("isa", ISAS)
def test_splitting_long_key_ranges_over_threads_changes_nothing(isa: str) -> None:
    case = make_case(5, heads=4, dim=64, count=2, keys=20_000, topk=512, spread=2, sequences=1)
    case = replace(case, visible=np.array([20_000, 15_003], np.int32), rows_per_block=64)
    pool_rows, tables = paged(case, np.random.default_rng(3))
    whole = call(isa, case, pool_rows, tables, 1, capacity=300, block=8)
    np.testing.assert_array_equal(whole[0], expected_topk(case))
    np.testing.assert_array_equal(whole[1], expected_pool(case, 300, 8))
    for threads in (2, 5):
        split = call(isa, case, pool_rows, tables, threads, capacity=300, block=8)
        np.testing.assert_array_equal(split[0], whole[0])
        np.testing.assert_array_equal(split[1], whole[1])


@pytest.mark.parametrize("isa", ISAS)
def test_equal_scores_go_to_the_lowest_positions(isa: str) -> None:
    """All scores 0 (every dot product is negative): the first k win, across tiles and parts."""
    dim, keys = 64, 9000
    case = make_case(6, heads=8, dim=dim, count=1, keys=keys, topk=500, spread=1, sequences=1)
    negative, positive = case.queries.copy(), case.keys.copy()
    negative[..., : dim // 2] |= 0x88
    positive[..., : dim // 2] &= 0x77
    case = replace(
        case, queries=negative, keys=positive, visible=np.array([keys], np.int32), rows_per_block=32
    )
    pool_rows, tables = paged(case, np.random.default_rng(4))
    for threads in (1, 4):
        got, pool = call(isa, case, pool_rows, tables, threads, capacity=100, block=8)
        np.testing.assert_array_equal(got[0], np.arange(500))
        # The newest block is pinned; the others tie.
        np.testing.assert_array_equal(pool[0], [*range(99), (keys - 1) // 8])


@pytest.mark.parametrize("isa", ISAS)
def test_a_causal_prefill_equals_its_queries_one_by_one(isa: str) -> None:
    case = make_case(7, heads=8, dim=128, count=150, keys=600, topk=64, spread=3, sequences=1)
    case = replace(case, visible=np.arange(450, 600, dtype=np.int32), rows_per_block=16)
    pool_rows, tables = paged(case, np.random.default_rng(5))
    together, _ = call(isa, case, pool_rows, tables, 2)
    for n in (0, 1, 77, 149):
        one = replace(
            case, queries=case.queries[n : n + 1], weights=case.weights[n : n + 1],
            visible=case.visible[n : n + 1], sequences=case.sequences[n : n + 1],
        )  # fmt: skip
        alone, _ = call(isa, one, pool_rows, tables, 1)
        np.testing.assert_array_equal(alone[0], together[n])


@pytest.mark.parametrize("isa", ISAS)
def test_rows_may_lie_apart(isa: str) -> None:
    """The row stride is an argument: bytes between rows are never read."""
    case = make_case(8, heads=8, dim=96, count=5, keys=100, topk=20, spread=2)
    pool_rows, tables = paged(case, np.random.default_rng(6), gap=5)
    got, _ = call(isa, case, pool_rows, tables, 1)
    np.testing.assert_array_equal(got, expected_topk(case))


@pytest.mark.parametrize("isa", ISAS)
def test_groups_of_zeros_and_extreme_scales_score_exactly(isa: str) -> None:
    """A zero group carries the smallest scale byte; a tiny weight must not meet a flushed product."""
    case = make_case(9, heads=8, dim=128, count=6, keys=200, topk=30, spread=2, sequences=1)
    keys, queries, weights = case.keys.copy(), case.queries.copy(), case.weights.copy()
    keys[0, ::3, :16] = 0x80
    keys[0, ::3, 64] = 1
    keys[0, 5] = 0
    queries[0, :, 16:32] = 0
    queries[0, :, 65] = 1
    queries[1, 2, 64:] = 90
    queries[2, 3, 64:] = 1
    weights[3, :4] = [0.0, 1e-30, -1e20, 3e-41]
    case = replace(
        case, keys=keys, queries=queries, weights=weights, visible=np.full(6, 200, np.int32)
    )
    pool_rows, tables = paged(case, np.random.default_rng(7))
    got, _ = call(isa, case, pool_rows, tables, 1)
    np.testing.assert_array_equal(got, expected_topk(case))


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    jobs = [
        make_case(s, heads=8, dim=64, count=8, keys=900, topk=50, spread=2) for s in range(6)
    ]  # fmt: skip
    pools = [paged(case, np.random.default_rng(8)) for case in jobs]
    expected = [expected_topk(case) for case in jobs]
    isa = ISAS[-1]

    def work(i: int) -> bool:
        got = [call(isa, jobs[i], *pools[i], 3)[0] for _ in range(20)]
        return all(np.array_equal(g, expected[i]) for g in got)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.parametrize("isa", ISAS)
def test_impossible_arguments_are_refused(isa: str) -> None:
    case = make_case(10, heads=4, dim=64, count=1, keys=10, topk=4, spread=1)
    pool_rows, tables = paged(case, np.random.default_rng(9))
    assert NATIVE.cedar_set_isa(isa.encode()) == 0
    out = np.zeros((1, 4), np.int32)
    for dim, topk in ((48, 4), (0, 4), (160, 4), (64, 0)):
        status = NATIVE.cedar_index_topk(
            address(case.queries), address(case.weights), address(pool_rows),
            ctypes.c_int64(pool_rows.shape[1]), address(tables), ctypes.c_int64(tables.shape[1]),
            8, address(case.sequences), address(case.visible), 1, 4, dim, topk, None, None, 0, 1,
            address(out), 1,
        )  # fmt: skip
        assert status != 0
