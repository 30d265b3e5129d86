"""Projections of the native library: exact weights, float32 sums, and bits that ignore the batch.

Reduction orders differ between instruction sets and from torch, so sums are compared with float64 at
the accuracy of float32 accumulation. What must be exact is what a weight means, and that a row has
the same bits alone, in any batch and on any number of threads.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import draw, library_or_skip, multiply, same_bits, weight_of
from torch import Tensor

from cedar.errors import UsageError
from cedar.formats import codec
from cedar.kernels.native.library import NativeLibrary
from cedar.kernels.operators import Weight
from cedar.kernels.reference import decode_weight

library_or_skip()
KINDS = ("float32", "bfloat16", "fp8", "fp4")
DTYPES = (torch.float32, torch.bfloat16)
EXAMPLES = settings(max_examples=40, deadline=None)
# Around the edges of tiles (16 rows, 16 columns), unpacked lines (128 inputs) and blocks (256 rows).
ROWS = st.sampled_from([1, 3, 16, 31, 33, 64, 100, 257])
WIDTHS = st.sampled_from([32, 64, 96, 128, 160, 256, 640])
COUNTS = st.sampled_from([1, 2, 5, 15, 16, 17, 33, 70])


def exact_product(x: Tensor, weight: Weight, quantise: bool) -> Tensor:
    if quantise:
        x = codec.dequantise_act(codec.quantise_act(x)).to(x.dtype)
    return x.double() @ decode_weight(weight, torch.float32).double().T


@EXAMPLES
@given(rows=ROWS, width=WIDTHS, count=COUNTS, kind=st.sampled_from(KINDS),
       dtype=st.sampled_from(DTYPES), quantise=st.booleans())  # fmt: skip
def test_products_are_sums_of_exact_terms_rounded_once(
    native_library: NativeLibrary, rows: int, width: int, count: int, kind: str, dtype: torch.dtype,
    quantise: bool,
) -> None:  # fmt: skip
    x, weight = draw(1, count, width).to(dtype), weight_of(0, rows, width, kind)
    wide = multiply(native_library, x, weight, torch.float32, quantise=quantise)
    exact = exact_product(x, weight, quantise)
    assert (wide - exact).abs().max() <= 3e-6 * exact.abs().max()
    narrow = multiply(native_library, x, weight, torch.bfloat16, quantise=quantise)
    assert same_bits(narrow, wide.bfloat16())


@pytest.mark.parametrize("width", [1, 7, 33, 70])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_plain_weights_may_have_any_width(
    native_library: NativeLibrary, kind: str, width: int
) -> None:
    for dtype in DTYPES:
        for count in (1, 20):
            x, weight = draw(1, count, width).to(dtype), weight_of(0, 37, width, kind)
            exact = exact_product(x, weight, False)
            ours = multiply(native_library, x, weight, torch.float32, quantise=False)
            assert (ours - exact).abs().max() <= 3e-6 * exact.abs().max()


@pytest.mark.parametrize("case", ["fp8_a", "fp8_b", "fp8_c", "fp4_a", "fp4_b", "fp4_c"])
def test_recorded_products(
    native_library: NativeLibrary, kernel_vectors: dict[str, Tensor], case: str
) -> None:
    x, values, scale, wide, narrow = (
        kernel_vectors[f"gemm.{case}.{name}"]
        for name in ("x", "w", "w_scale", "out_f32", "out_bf16")
    )
    weight = Weight(values, scale)
    ours = multiply(native_library, x, weight, torch.float32)
    assert (ours - wide).abs().max() <= 1e-6 * wide.abs().max()
    difference = multiply(native_library, x, weight, torch.bfloat16).float() - narrow.float()
    assert difference.abs().max() <= 2.0**-8 * narrow.float().abs().max()


def one_hot_rows(width: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(width).to(dtype)


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Equal values; 0 may have either sign, and a result below 2^-126 may be flushed to 0."""
    tiny = theirs.abs() < 2.0**-126
    theirs = torch.where(tiny & (ours == 0), 0.0, theirs)
    return torch.equal(
        torch.nan_to_num(ours + 0.0), torch.nan_to_num(theirs + 0.0)
    ) and torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("count", [1, 128])
def test_every_fp4_code_under_every_scale_is_exact(
    native_library: NativeLibrary, count: int
) -> None:
    # Row r has scale r everywhere; the columns run through the 16 codes. NaN and infinity spread
    # over a whole output, so only one input is nonzero at a time.
    codes = torch.arange(128, dtype=torch.uint8) % 16
    packed = codec.pack_nibbles(codes).repeat(255, 1).view(torch.int8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 4)
    weight = Weight(packed, scales.view(torch.float8_e8m0fnu))
    expected = decode_weight(weight, torch.float32)
    finite = torch.isfinite(expected).all(1)
    x = one_hot_rows(128, torch.bfloat16)[:count]
    ours = multiply(native_library, x, weight, torch.float32, quantise=False).T
    assert same_numbers(ours[finite], expected[finite, :count])


@pytest.mark.parametrize("count", [1, 128])
def test_every_fp8_code_under_many_scales_is_exact(
    native_library: NativeLibrary, count: int
) -> None:
    # Rows run through the codes, row blocks of 32 through the scales.
    scale_bytes = torch.tensor([0, 1, 9, 10, 11, 100, 126, 127, 128, 200, 245, 246, 247, 254])
    codes = torch.arange(256).repeat(len(scale_bytes))
    codes = torch.where(codes % 128 == 127, codes - 1, codes)  # NaN has a test of its own
    values = codes.to(torch.uint8)[:, None].repeat(1, 128)
    scales = scale_bytes.repeat_interleave(8).to(torch.uint8)[:, None].repeat(1, 4)
    weight = Weight(values.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))
    expected = decode_weight(weight, torch.float32)
    finite = torch.isfinite(expected).all(1)
    x = one_hot_rows(128, torch.bfloat16)[:count]
    ours = multiply(native_library, x, weight, torch.float32, quantise=False).T
    assert same_numbers(ours[finite], expected[finite, :count])


def test_nan_codes_and_nan_scales_reach_the_output(native_library: NativeLibrary) -> None:
    for kind in ("fp8", "fp4"):
        for where in ("values", "scale") if kind == "fp8" else ("scale",):
            weight = weight_of(0, 64, 128, kind)
            tensor = weight.values if where == "values" else weight.scale
            assert tensor is not None
            tensor.view(torch.uint8)[0, 1] = 255
            for count in (1, 40):
                ours = multiply(
                    native_library, draw(1, count, 128).bfloat16(), weight, torch.float32
                )
                assert ours[:, 0].isnan().all()
                assert not ours[:, 63].isnan().any()


@EXAMPLES
@given(data=st.data(), rows=ROWS, width=WIDTHS, kind=st.sampled_from(KINDS),
       dtype=st.sampled_from(DTYPES))  # fmt: skip
def test_a_row_has_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(
    native_library: NativeLibrary, data: st.DataObject, rows: int, width: int, kind: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    x, weight = draw(2, 600, width).to(dtype), weight_of(0, rows, width, kind)
    whole = multiply(native_library, x[:100], weight, torch.float32, threads=1)
    first = data.draw(st.integers(0, 99))
    last = data.draw(st.integers(first + 1, 100))
    threads = data.draw(st.integers(1, 4))
    part = multiply(native_library, x[first:last], weight, torch.float32, threads=threads)
    assert same_bits(part, whole[first:last])
    # More columns than one block holds.
    assert same_bits(multiply(native_library, x, weight, torch.float32)[:100], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_large_enough_for_several_threads_has_the_bits_of_one(
    native_library: NativeLibrary, kind: str
) -> None:
    weight = weight_of(0, 2080, 512, kind)
    for count in (1, 40):
        x = draw(1, count, 512).bfloat16()
        one = multiply(native_library, x, weight, torch.float32, threads=1)
        for threads in (2, 3):
            assert same_bits(
                multiply(native_library, x, weight, torch.float32, threads=threads), one
            )


def test_strides_are_honoured_and_neighbours_left_alone(native_library: NativeLibrary) -> None:
    for kind in KINDS:
        weight = weight_of(0, 40, 64, kind)
        for dtype in DTYPES:
            x = draw(3, 20, 150).to(dtype)
            y = torch.full((20, 70), 5.0, dtype=dtype)
            multiply(native_library, x[:, 11:75], weight, dtype, y=y[:, 9:49])
            expected = multiply(native_library, x[:, 11:75].contiguous(), weight, dtype)
            assert same_bits(y[:, 9:49], expected)
            assert (y[:, :9] == 5).all()
            assert (y[:, 49:] == 5).all()


def test_no_rows_is_a_result_without_rows(native_library: NativeLibrary) -> None:
    assert multiply(
        native_library, draw(1, 0, 32), weight_of(0, 8, 32, "fp4"), torch.float32
    ).shape == (0, 8)


def test_widths_and_kinds_that_do_not_exist_are_refused(native_library: NativeLibrary) -> None:
    with pytest.raises(UsageError, match="multiple"):
        multiply(
            native_library,
            draw(1, 2, 48),
            weight_of(0, 8, 48, "float32"),
            torch.float32,
            quantise=True,
        )
    with pytest.raises(UsageError, match="unknown"):
        native_library.call("linear", 0, 0, 0, 0, 0, None, 4, 8, 32, 0, 0, 0, 8, 1)
    with pytest.raises(UsageError, match="unknown"):
        native_library.call("linear", 0, 2, 0, 0, 0, None, 0, 8, 32, 0, 0, 0, 8, 1)
