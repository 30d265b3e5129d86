"""Thin calls into the native library for the tests beside this file: tensors in, tensors out.

The operator set above the library checks and reshapes; these tests want strides, row numbers and dtypes
that it never passes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cedar.formats import codec
from cedar.formats.rows import RowFormat
from cedar.kernels.native.library import NativeLibrary, load
from cedar.kernels.operators import Weight

ROW_KINDS = {"window": 0, "main": 1, "index": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def library_or_skip() -> NativeLibrary:
    """The built library; without one the calling module is skipped."""
    library, reason = load()
    if library is None:
        pytest.skip(f"native kernels were not built: {reason}", allow_module_level=True)
    return library


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for a seed in every test."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(
    seed: int, out: int, inp: int, kind: str, dtype: torch.dtype = torch.bfloat16
) -> Weight:
    """A random projection `[out, inp]`.

    Args:
        kind: fp8 or fp4 (packed), plain (of `dtype`), or the name of a plain dtype.
    """
    values = draw(seed, out, inp) * inp**-0.5
    if kind not in ("fp8", "fp4"):
        return Weight(values.to(dtype if kind == "plain" else getattr(torch, kind)))
    packed = codec.encode_fp8_weight(values) if kind == "fp8" else codec.encode_fp4_weight(values)
    tag = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    return Weight(packed.codes.view(tag), packed.scales.view(torch.float8_e8m0fnu))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, dtypes and bits; NaN equals NaN, 0 differs from -0."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def store(
    library: NativeLibrary, x: Tensor, pool: Tensor, fmt: RowFormat, where: Tensor | None = None,
    threads: int = 2,
) -> None:  # fmt: skip
    """Quantise rows of x `[n, width]` (any row stride) into `pool` `[R, >= row_bytes]`."""
    library.call(
        "store_rows", x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.shape[0], ROW_KINDS[fmt.kind],
        x.shape[1], pool.data_ptr(), pool.stride(0), pool.shape[0],
        None if where is None else where.data_ptr(), threads,
    )  # fmt: skip


def fetch(
    library: NativeLibrary, pool: Tensor, fmt: RowFormat, dtype: torch.dtype,
    where: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dequantise rows of a pool; row number -1 gives zeros."""
    count = pool.shape[0] if where is None else where.shape[0]
    out = torch.full((count, fmt.width), float("nan"), dtype=dtype)
    library.call(
        "load_rows", pool.data_ptr(), pool.stride(0), pool.shape[0],
        None if where is None else where.data_ptr(), count, ROW_KINDS[fmt.kind], fmt.width,
        out.data_ptr(), DTYPES[dtype], out.stride(0), 2,
    )  # fmt: skip
    return out


def kind_of(weight: Weight) -> int:
    """The weight kind flag: 0 float32, 1 bfloat16, 2 fp8, 3 fp4."""
    if weight.scale is None:
        return DTYPES[weight.values.dtype]
    return 3 if weight.values.dtype == torch.int8 else 2


def multiply(
    library: NativeLibrary, x: Tensor, weight: Weight, out_dtype: torch.dtype, *,
    quantise: bool | None = None, threads: int = 2, y: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`x [n, in]` (any row stride) times a weight; x is rounded first for packed weights."""
    kind = kind_of(weight)
    rows = weight.values.shape[0]
    if y is None:
        y = torch.full((x.shape[0], rows), float("nan"), dtype=out_dtype)
    library.call(
        "linear", x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.shape[0], weight.values.data_ptr(),
        None if weight.scale is None else weight.scale.data_ptr(), kind, rows, x.shape[1],
        int(kind >= 2 if quantise is None else quantise), y.data_ptr(), DTYPES[out_dtype],
        y.stride(0), threads,
    )  # fmt: skip
    return y
