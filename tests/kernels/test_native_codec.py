"""Packed cache rows and activation rounding of the native library: every bit, in every variant.

The truth is the recorded vectors and the slow tensor codec, which rounds by comparing with midpoints and
by torch's own E4M3 conversion: neither shares a line with the C++.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import DTYPES, fetch, library_or_skip, same_bits, store
from torch import Tensor

from cedar.errors import UsageError
from cedar.formats import codec
from cedar.formats.rows import RowFormat, RowKind
from cedar.kernels.native.library import NativeLibrary

library_or_skip()
KINDS: tuple[RowKind, ...] = ("window", "main", "index")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
EXAMPLES = settings(max_examples=25, deadline=None)


def finite_bf16() -> Tensor:
    """Every finite bfloat16 number once, shuffled, as rows of 512."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[torch.isfinite(numbers)]
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
    return numbers[order][: len(numbers) // 512 * 512].view(-1, 512)


def check(native_library: NativeLibrary, x: Tensor, kind: RowKind) -> None:
    """Store and fetch equal the slow codec, bit for bit."""
    fmt = RowFormat(kind, x.shape[1])
    pool = torch.zeros(x.shape[0], fmt.row_bytes, dtype=torch.uint8)
    store(native_library, x, pool, fmt)
    expected = codec.encode_rows(x, fmt)
    assert torch.equal(pool, expected)
    assert same_bits(
        fetch(native_library, pool, fmt, torch.float32), codec.decode_rows(expected, fmt)
    )


RECORDED: list[tuple[RowKind, str, str, str]] = [
    ("window", "act_quant.ue8m0_b32.x", "act_quant.ue8m0_b32", "q"),
    ("index", "fp4.x", "fp4.e8m0_b32", "packed"),
    ("main", "fp4.x", "fp4.e4m3_b16", "packed"),
]


@BOTH
@pytest.mark.parametrize(("kind", "source", "group", "codes"), RECORDED)
def test_rows_are_the_recorded_bytes_and_read_back_as_the_recorded_values(
    native_library: NativeLibrary, kernel_vectors: dict[str, Tensor], kind: RowKind, source: str,
    group: str, codes: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    x = kernel_vectors[source].to(dtype)
    fmt = RowFormat(kind, x.shape[1])
    pool = torch.zeros(x.shape[0], fmt.row_bytes, dtype=torch.uint8)
    store(native_library, x, pool, fmt)
    recorded = (kernel_vectors[f"{group}.{name}"].view(torch.uint8) for name in (codes, "scale"))
    assert torch.equal(pool, torch.cat(tuple(recorded), dim=1))
    values = kernel_vectors[f"{group}.qdq"]
    assert same_bits(fetch(native_library, pool, fmt, torch.bfloat16), values)
    assert same_bits(fetch(native_library, pool, fmt, torch.float32), values.float())


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_bfloat16_number_is_encoded_as_the_codec_does(
    native_library: NativeLibrary, kind: RowKind, dtype: torch.dtype
) -> None:
    check(native_library, finite_bf16().to(dtype), kind)


@EXAMPLES
@given(
    kind=st.sampled_from(KINDS),
    groups=st.integers(1, 5),
    count=st.integers(1, 9),
    exponent=st.integers(-140, 126),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_rows_of_any_magnitude_are_encoded_as_the_codec_does(
    native_library: NativeLibrary, kind: RowKind, groups: int, count: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 32 * groups, generator=generator, dtype=torch.float64)
    x = (x * 2.0**exponent).clamp(-3e38, 3e38).float()
    check(native_library, x, kind)
    check(native_library, x.bfloat16(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_midpoints_go_to_the_even_code(native_library: NativeLibrary, kind: RowKind) -> None:
    codes = torch.arange(127 if kind == "window" else 8)
    values = (
        codec.e4m3_decode(codes.to(torch.uint8)) if kind == "window" else codec.e2m1_decode(codes)
    )
    middles = (values[:-1] + values[1:]) / 2
    signed = torch.cat((middles, -middles, torch.nextafter(middles, middles + 1), values))
    top = values[-1].item()  # keeps the scale at 1 in every group
    rows = torch.nn.functional.pad(signed, (0, -len(signed) % 15)).view(-1, 15)
    x = torch.cat((rows, torch.full((len(rows), 1), top)), dim=1)
    x = torch.cat((x, x.flip(0)), dim=1)
    for shift in (-3, 0, 5):
        check(native_library, x * 2.0**shift, kind)


def test_scales_of_the_worked_examples(native_library: NativeLibrary) -> None:
    def scales(kind: RowKind, amax: list[float], size: int) -> list[int]:
        x = torch.zeros(len(amax), size)
        x[:, 3] = torch.tensor(amax)
        fmt = RowFormat(kind, size)
        pool = torch.zeros(len(amax), fmt.row_bytes, dtype=torch.uint8)
        store(native_library, x, pool, fmt)
        return [int(b) for b in pool[:, -1]]

    window = scales("window", [0, 1e-4, 447, 448, 449, 1, 3.5, 7, 0.5], 32)
    assert [b - 127 for b in window] == [-22, -22, 0, 0, 1, -8, -7, -6, -9]
    index = scales("index", [6, 6.0001, 3, 1, 0.75, 0], 32)
    assert [b - 127 for b in index] == [0, 1, -1, -2, -3, -126]
    assert scales("main", [0, 6, 1e30], 16) == [1, 0x38, 0x7E]  # 2^-9, 1, 448


def test_infinity_and_nan_poison_their_group_only(native_library: NativeLibrary) -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        x = torch.ones(1, 96)
        x[0, 40] = bad
        for kind in ("window", "index"):
            fmt = RowFormat(kind, 96)
            pool = torch.zeros(1, fmt.row_bytes, dtype=torch.uint8)
            store(native_library, x, pool, fmt)
            values = fetch(native_library, pool, fmt, torch.float32)[0]
            assert torch.isnan(values[32:64]).all()
            assert torch.equal(values[:32], torch.ones(32))
            assert torch.equal(values[64:], torch.ones(32))


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_where_they_are_told_and_nowhere_else(
    native_library: NativeLibrary, kind: RowKind, dtype: torch.dtype
) -> None:
    fmt = RowFormat(kind, 64)
    wide = torch.randn(70, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = wide[:, 10:74]
    where = torch.randperm(200, generator=torch.Generator().manual_seed(2))[:70]
    pool = torch.full((200, fmt.row_bytes + 5), 7, dtype=torch.uint8)
    expected = pool.clone()
    expected[where, : fmt.row_bytes] = codec.encode_rows(x, fmt)
    store(native_library, x, pool, fmt, where)
    assert torch.equal(pool, expected)
    asked = torch.cat((where[:5], torch.tensor([-1]), where[5:9]))
    values = fetch(native_library, pool, fmt, dtype, asked)
    rows = codec.decode_rows(pool[asked, : fmt.row_bytes], fmt).to(dtype)
    rows[5] = 0
    assert same_bits(values, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_does_not_show(native_library: NativeLibrary, kind: RowKind) -> None:
    fmt = RowFormat(kind, 512)
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(3))
    pools = [torch.zeros(300, fmt.row_bytes, dtype=torch.uint8) for _ in range(2)]
    store(native_library, x, pools[0], fmt, threads=1)
    store(native_library, x, pools[1], fmt, threads=3)
    assert torch.equal(*pools)


def test_wrong_arguments_are_refused_before_anything_is_written(
    native_library: NativeLibrary,
) -> None:
    fmt = RowFormat("window", 32)
    pool = torch.zeros(4, fmt.row_bytes, dtype=torch.uint8)
    x = torch.ones(2, 32)
    for where in ([0, 4], [0, -1]):
        with pytest.raises(UsageError, match="outside the pool"):
            store(native_library, x, pool, fmt, torch.tensor(where))
    with pytest.raises(UsageError, match="outside the pool"):
        fetch(native_library, pool, fmt, torch.float32, torch.tensor([0, -2]))
    with pytest.raises(UsageError, match="outside the pool"):
        store(native_library, torch.ones(5, 32), pool, fmt)
    with pytest.raises(UsageError, match="multiple"):
        store(native_library, torch.ones(2, 33), pool, fmt)
    assert not pool.any()


def rounded(native_library: NativeLibrary, x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    native_library.call(
        "fake_quantise", x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.shape[0], x.shape[1],
        out.data_ptr(), DTYPES[dtype], out.stride(0), 2,
    )  # fmt: skip
    return out


@BOTH
def test_activation_rounding_is_quantising_and_back(
    native_library: NativeLibrary, kernel_vectors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    recorded = kernel_vectors["act_quant.ue8m0_b32.x"].to(dtype)
    assert same_bits(
        rounded(native_library, recorded, torch.bfloat16), kernel_vectors["act_quant.ue8m0_b32.qdq"]
    )
    for x in (finite_bf16().to(dtype), recorded):
        expected = codec.dequantise_act(codec.quantise_act(x))
        assert same_bits(rounded(native_library, x, torch.float32), expected)
        assert same_bits(rounded(native_library, x, torch.bfloat16), expected.bfloat16())


def test_flushing_of_subnormals_does_not_change_codes(native_library: NativeLibrary) -> None:
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(4))
    x[:, ::3] *= 1e-3  # many codes in the subnormal range of E4M3 and E2M1
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        for kind in KINDS:
            fmt = RowFormat(kind, 512)
            pool = torch.zeros(8, fmt.row_bytes, dtype=torch.uint8)
            store(native_library, x, pool, fmt, threads=1)
            values = fetch(native_library, pool, fmt, torch.float32)
            torch.set_flush_denormal(False)
            assert torch.equal(pool, codec.encode_rows(x, fmt))
            assert same_bits(values, codec.decode_rows(pool, fmt))
            torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)
