"""Sparse attention of the native library against float64, in every instruction-set variant.

Rows that no query sees hold 0xFF bytes (NaN scales, NaN values): reading one would show.
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
import torch
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
Doubles = npt.NDArray[np.float64]


def e4m3(codes: Bytes) -> Doubles:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(int) - 7)
    return sign * np.where(exponent == 0, mantissa / 512, normal)


def decode_window(rows: Bytes, dim: int) -> Doubles:
    """`[..., dim + dim/32]`: E4M3 values, then one power-of-two scale per 32."""
    scales = np.ldexp(1.0, rows[..., dim:].astype(int) - 127)
    return e4m3(rows[..., :dim]) * np.repeat(scales, 32, axis=-1)


def decode_main(rows: Bytes, dim: int) -> Doubles:
    """`[..., dim/2 + dim/16]`: E2M1 pairs, even element in the low nibble, then E4M3 scales."""
    codes = rows[..., : dim // 2]
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], dim)
    return E2M1[nibbles] * np.repeat(e4m3(rows[..., dim // 2 :]), 16, axis=-1)


def random_window(rng: np.random.Generator, count: int, dim: int) -> Bytes:
    """Window rows with every E4M3 value (no NaN) and scales 2^-9 .. 2^-7."""
    values = rng.integers(0, 0x7F, (count, dim), dtype=np.uint8)
    values |= rng.integers(0, 2, (count, dim), dtype=np.uint8) << 7
    scales = rng.integers(118, 121, (count, dim // 32), dtype=np.uint8)
    return np.concatenate((values, scales), axis=-1)


def random_main(rng: np.random.Generator, count: int, dim: int) -> Bytes:
    """Compressed rows with scales from subnormal to 1.875, some of them negative."""
    scales = rng.integers(1, 0x40, (count, dim // 16), dtype=np.uint8)
    scales |= (rng.integers(0, 8, (count, dim // 16)) == 0).astype(np.uint8) << 7
    return np.concatenate(
        (rng.integers(0, 256, (count, dim // 2), dtype=np.uint8), scales), axis=-1
    )


@dataclass(frozen=True)
class Case:
    """One call: N queries, dense copies of what they may see, and where it is stored."""

    q: torch.Tensor  # [N, heads, dim]
    q_selected: torch.Tensor | None
    window: Bytes  # [positions, row bytes] of one token sequence, shared by the queries
    base: npt.NDArray[np.int64]
    lo: Ints
    hi: Ints
    modulus: int
    rows: Bytes  # [S, entries, row bytes]
    sequences: Ints
    selected: Ints | None  # [N, topk]
    sink: npt.NDArray[np.float32]
    rows_per_block: int
    scale: float

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    def one(self, n: int) -> Case:
        """The same call for query n alone."""
        keep = slice(n, n + 1)
        return replace(
            self, q=self.q[keep], base=self.base[keep], lo=self.lo[keep], hi=self.hi[keep],
            q_selected=None if self.q_selected is None else self.q_selected[keep],
            sequences=self.sequences[keep],
            selected=None if self.selected is None else self.selected[keep].copy(),
        )  # fmt: skip


def expected(case: Case, apart: bool) -> tuple[Doubles, Doubles, float]:
    """Window part (or everything), selected part, and the largest value that entered."""
    count, heads, dim = case.q.shape
    out, out_selected = np.zeros((2, count, heads, dim))
    largest = 0.0
    for n in range(count):
        near = decode_window(case.window[case.lo[n] : case.hi[n] + 1], dim).reshape(-1, dim)
        chosen = [] if case.selected is None else [p for p in case.selected[n] if p >= 0]
        far = decode_main(case.rows[case.sequences[n], chosen], dim).reshape(-1, dim)
        if len(near) + len(far) == 0:
            continue
        q = case.q[n].double().numpy()
        other = q if case.q_selected is None else case.q_selected[n].double().numpy()
        z = np.concatenate((q @ near.T, other @ far.T), axis=1) * np.float64(np.float32(case.scale))
        top = np.maximum(z.max(1), case.sink)[:, None]
        p = np.exp(z - top)
        p /= p.sum(1, keepdims=True) + np.exp(case.sink[:, None] - top)
        out[n], out_selected[n] = p[:, : len(near)] @ near, p[:, len(near) :] @ far
        largest = max(largest, *(float(np.abs(x).max()) for x in (near, far) if len(x)))
    if not apart:
        out += out_selected
    return out, out_selected, largest


def address(array: npt.NDArray[np.generic] | None) -> ctypes.c_void_p:
    if array is None:
        return ctypes.c_void_p(None)
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def store(case: Case, rng: np.random.Generator, gap: int = 0) -> tuple[Bytes, Bytes, Ints]:
    """Window buffer, pool and tables of the case; everything unseen is 0xFF."""
    row_bytes = case.window.shape[1] + gap
    span = int(case.base.max()) + min(case.modulus, len(case.window))
    window = np.full((span + 1, row_bytes), 0xFF, np.uint8)
    for base, lo, hi in zip(case.base, case.lo, case.hi):
        for p in range(lo, hi + 1):
            window[base + p % case.modulus, : -gap or None] = case.window[p]
    sequences, count, row_bytes = case.rows.shape
    blocks = -(-count // case.rows_per_block)
    ids = rng.permutation(sequences * blocks + 3)[: sequences * blocks]
    tables = ids.reshape(sequences, blocks).astype(np.int32)
    pool = np.full(((sequences * blocks + 3) * case.rows_per_block, row_bytes + gap), 255, np.uint8)
    if case.selected is not None:
        for s, positions in zip(case.sequences, case.selected):
            for p in positions[positions >= 0]:
                block, offset = divmod(int(p), case.rows_per_block)
                at = tables[s, block] * case.rows_per_block + offset
                pool[at, :row_bytes] = case.rows[s, p]
    return window, pool, tables


def call(
    isa: str, case: Case, stored: tuple[Bytes, Bytes, Ints], threads: int, apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the library: both parts, or everything twice."""
    assert NATIVE.cedar_set_isa(isa.encode()) == 0
    window, pool, tables = stored
    count, heads, dim = case.q.shape
    q = case.q.contiguous()
    other = None if case.q_selected is None else case.q_selected.contiguous()
    out = torch.full_like(q, float("nan"))
    out_selected = torch.full_like(q, float("nan")) if apart else None
    status = NATIVE.cedar_sparse_attention(
        ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(None if other is None else other.data_ptr()),
        int(q.dtype == torch.bfloat16), address(window), ctypes.c_int64(window.shape[1]),
        address(case.base), address(case.lo), address(case.hi), ctypes.c_int64(case.modulus),
        address(pool), ctypes.c_int64(pool.shape[1]), address(tables),
        ctypes.c_int64(tables.shape[1]), case.rows_per_block, address(case.sequences),
        address(case.selected), 0 if case.selected is None else case.selected.shape[1],
        address(case.sink), ctypes.c_float(case.scale), count, heads, dim,
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if out_selected is None else out_selected.data_ptr()), threads,
    )  # fmt: skip
    assert status == 0
    return out, out if out_selected is None else out_selected


def make_case(
    seed: int, *, dtype: torch.dtype, count: int, heads: int, dim: int, window: int, topk: int,
    other_queries: bool = False, rows_per_block: int = 8, sequences: int = 2, holes: bool = True,
) -> Case:  # fmt: skip
    """Consecutive queries of a prefill chunk, each with a window of up to `window` positions."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (count, heads, dim)
    start = int(rng.integers(0, 40))
    hi = (start + np.arange(count)).astype(np.int32)
    lo = np.maximum(0, hi - window + 1).astype(np.int32)
    entries = 60 + topk
    selected = np.full((count, topk), -1, np.int32)
    for row in selected:
        chosen = np.sort(rng.choice(entries, int(rng.integers(0, topk + 1)), replace=False))
        row[: len(chosen)] = chosen
    if holes:
        for n in range(count):
            if rng.integers(0, 6) == 0:
                lo[n] = hi[n] + 1
            if rng.integers(0, 6) == 0:
                selected[n] = -1
            elif rng.integers(0, 4) == 0:
                selected[n, rng.integers(0, 2, topk) == 0] = -1
    return Case(
        q=torch.randn(shape, generator=generator).to(dtype),
        q_selected=torch.randn(shape, generator=generator).to(dtype) if other_queries else None,
        window=random_window(rng, start + count + 1, dim),
        base=np.zeros(count, np.int64), lo=lo, hi=hi, modulus=1 << 30,
        rows=random_main(rng, sequences * entries, dim).reshape(sequences, entries, -1),
        sequences=np.sort(rng.integers(0, sequences, count)).astype(np.int32),
        selected=selected if topk else None,
        sink=rng.standard_normal(heads).astype(np.float32),
        rows_per_block=rows_per_block, scale=dim**-0.5,
    )  # fmt: skip


cases = st.builds(
    make_case,
    seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    count=st.integers(1, 24),
    heads=st.sampled_from([2, 3, 4, 8, 12, 16, 20, 32, 64]),
    dim=st.sampled_from([32, 64, 96, 128, 160, 512]),
    window=st.sampled_from([0, 1, 15, 33, 64]),
    topk=st.sampled_from([0, 1, 17, 40]),
    other_queries=st.booleans(),
    rows_per_block=st.sampled_from([1, 7, 8, 64]),
)


def check(case: Case, got: tuple[torch.Tensor, torch.Tensor], apart: bool) -> None:
    """float32: 1e-5 of the largest output. bfloat16: the weights and the result are rounded once
    each, to 2^-9 relative, so no output is off by more than 2^-8 of the largest value."""
    want, want_selected, largest = expected(case, apart)
    bound = 1e-5 if case.q.dtype == torch.float32 else 1.01 * 2.0**-8
    for actual, wanted in ((got[0], want), (got[1], want_selected if apart else want)):
        assert torch.isfinite(actual).all()
        assert np.abs(actual.double().numpy() - wanted).max() <= bound * largest


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(case=cases, threads=st.integers(1, 3), apart=st.booleans())
def test_the_output_is_the_softmax_of_what_the_query_sees(
    isa: str, case: Case, threads: int, apart: bool
) -> None:
    stored = store(case, np.random.default_rng(1))
    check(case, call(isa, case, stored, threads, apart), apart)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=10, deadline=None)
@given(case=cases, apart=st.booleans())
def test_neighbours_and_threads_change_no_bit(isa: str, case: Case, apart: bool) -> None:
    """Prefill modes are compared bit for bit, so a query must not feel its batch."""
    stored = store(case, np.random.default_rng(2))
    together = call(isa, case, stored, 2, apart)
    for n in range(len(case.lo)):
        alone = call(isa, case.one(n), stored, 1 + n % 3, apart)
        assert torch.equal(alone[0][0], together[0][n])
        assert torch.equal(alone[1][0], together[1][n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_rings_wrap_and_sequences_have_their_own(isa: str, dtype: torch.dtype) -> None:
    """Decode of four sequences: rings of 20 slots, windows that wrap, rows with bytes between."""
    case = make_case(3, dtype=dtype, count=4, heads=4, dim=64, window=0, topk=5, holes=False)
    hi = np.array([3, 19, 25, 58], np.int32)
    lo = np.maximum(0, hi - 15).astype(np.int32)
    base = np.array([60, 0, 20, 40], np.int64)
    rng = np.random.default_rng(4)
    case = replace(case, base=base, lo=lo, hi=hi, modulus=20, window=random_window(rng, 60, 64))
    stored = store(case, np.random.default_rng(5), gap=3)
    check(case, call(isa, case, stored, 2), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_windows_far_apart_do_not_read_what_lies_between(isa: str, dtype: torch.dtype) -> None:
    case = make_case(6, dtype=dtype, count=5, heads=3, dim=64, window=0, topk=0, holes=False)
    lo = np.array([0, 2, 30, 31, 4], np.int32)
    case = replace(
        case, lo=lo, hi=lo + 6, window=random_window(np.random.default_rng(7), 40, 64)
    )  # fmt: skip
    stored = store(case, np.random.default_rng(8))
    check(case, call(isa, case, stored, 1), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_a_query_that_sees_nothing_gives_zeros(isa: str, dtype: torch.dtype) -> None:
    case = make_case(9, dtype=dtype, count=3, heads=4, dim=64, window=4, topk=6, holes=False)
    selected = np.full((3, 6), -1, np.int32)
    case = replace(case, lo=case.hi + 1, selected=selected)
    got = call(isa, case, store(case, np.random.default_rng(10)), 1, apart=True)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert torch.equal(got[1], torch.zeros_like(got[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_a_large_sink_takes_the_weight_and_a_missing_one_takes_none(
    isa: str, dtype: torch.dtype
) -> None:
    case = make_case(11, dtype=dtype, count=2, heads=4, dim=64, window=9, topk=6, holes=False)
    case = replace(case, sink=np.array([-np.inf, -200, 60, 300], np.float32))
    stored = store(case, np.random.default_rng(12))
    check(case, call(isa, case, stored, 1), False)


@pytest.mark.parametrize("isa", ISAS)
def test_every_stored_number_is_read_exactly(isa: str) -> None:
    """One entry and no sink: the output is the row itself, for all codes and scales."""
    dim = 512
    rng = np.random.default_rng(13)
    case = make_case(14, dtype=torch.bfloat16, count=1, heads=2, dim=dim, window=1, topk=1)
    q = torch.zeros_like(case.q)
    no_sink = np.full(2, -np.inf, np.float32)
    for i in range(8):
        scale_bytes = np.concatenate((np.arange(0x7F), np.arange(0x80, 0xFF))).astype(np.uint8)
        main = random_main(rng, 1, dim)
        main[0, dim // 2 :] = rng.permutation(scale_bytes)[: dim // 16]
        window = random_window(rng, 1, dim)
        window[0, dim:] = rng.integers(40, 200, dim // 32)
        if i == 0:
            window[0, :256] = np.where(np.arange(256) % 128 == 127, 0, np.arange(256))
        only_window = replace(
            case, q=q, sink=no_sink, window=window, lo=np.zeros(1, np.int32),
            hi=np.zeros(1, np.int32), selected=None,
        )  # fmt: skip
        only_main = replace(
            case, q=q, sink=no_sink, rows=main[None], sequences=np.zeros(1, np.int32),
            lo=np.ones(1, np.int32), hi=np.zeros(1, np.int32), selected=np.zeros((1, 1), np.int32),
        )  # fmt: skip
        for one, values in (
            (only_window, decode_window(window, dim)), (only_main, decode_main(main, dim))
        ):  # fmt: skip
            got, _ = call(isa, one, store(one, rng), 1)
            want = torch.from_numpy(values).to(torch.bfloat16).expand(2, dim)
            assert torch.equal(got[0], want)


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    jobs = [
        make_case(s, dtype=torch.bfloat16, count=20, heads=8, dim=128, window=32, topk=40)
        for s in range(6)
    ]
    stored = [store(case, np.random.default_rng(15)) for case in jobs]
    isa = ISAS[-1]
    first = [call(isa, case, rows, 1)[0] for case, rows in zip(jobs, stored)]

    def work(i: int) -> bool:
        return all(torch.equal(call(isa, jobs[i], stored[i], 3)[0], first[i]) for _ in range(20))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.parametrize("isa", ISAS)
def test_tile_registers_of_the_caller_survive(isa: str) -> None:
    """torch multiplies bfloat16 matrices with the same registers, on the same thread."""
    case = make_case(16, dtype=torch.bfloat16, count=4, heads=8, dim=64, window=20, topk=8)
    stored = store(case, np.random.default_rng(17))
    a = torch.randn(96, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    product = a @ a
    for _ in range(3):
        call(isa, case, stored, 1)
        assert torch.equal(a @ a, product)


@pytest.mark.parametrize("isa", ISAS)
def test_impossible_arguments_are_refused(isa: str) -> None:
    case = make_case(18, dtype=torch.float32, count=1, heads=2, dim=64, window=4, topk=0)
    stored = store(case, np.random.default_rng(19))
    with pytest.raises(AssertionError):
        call(isa, replace(case, q=case.q[..., :48]), stored, 1)
    with pytest.raises(AssertionError):
        call(isa, replace(case, modulus=0), stored, 1)
