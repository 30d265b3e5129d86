"""Recorded quantisers and quantised products: codes, scales, packing, rounding, matrix products."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_bf16, assert_f32, assert_same_bits
from torch import Tensor

from cedar.formats import codec
from cedar.formats.rows import RowFormat
from cedar.kernels.operators import Operators, Weight

Recorded = dict[str, Tensor]


def test_activation_codes_and_scales_are_the_recorded_bytes(kernel_vectors: Recorded) -> None:
    x = kernel_vectors["act_quant.ue8m0_b32.x"]
    quantised = codec.quantise_act(x)
    assert_same_bits(quantised.codes, kernel_vectors["act_quant.ue8m0_b32.q"].view(torch.uint8))
    assert_same_bits(
        quantised.scales, kernel_vectors["act_quant.ue8m0_b32.scale"].view(torch.uint8)
    )
    restored = codec.dequantise_act(quantised).to(torch.bfloat16)
    assert_same_bits(restored, kernel_vectors["act_quant.ue8m0_b32.qdq"])


@pytest.mark.parametrize(("kind", "group"), [("index", "e8m0_b32"), ("main", "e4m3_b16")])
def test_fp4_codes_scales_and_values_are_the_recorded_bytes(
    kernel_vectors: Recorded, kind: str, group: str
) -> None:
    x = kernel_vectors["fp4.x"]
    quantise = codec.quantise_index if kind == "index" else codec.quantise_main
    restore = codec.dequantise_index if kind == "index" else codec.dequantise_main
    quantised = quantise(x)
    assert_same_bits(quantised.codes, kernel_vectors[f"fp4.{group}.packed"])
    assert_same_bits(quantised.scales, kernel_vectors[f"fp4.{group}.scale"].view(torch.uint8))
    assert_same_bits(restore(quantised).to(torch.bfloat16), kernel_vectors[f"fp4.{group}.qdq"])


def test_every_byte_unpacks_to_its_two_recorded_values(kernel_vectors: Recorded) -> None:
    values = codec.e2m1_decode(codec.unpack_nibbles(kernel_vectors["fp4.unpack.bytes"][:, None]))
    assert_same_bits(values, kernel_vectors["fp4.unpack.values"])


ROWS = [
    ("window", "act_quant.ue8m0_b32.x", "act_quant.ue8m0_b32", "q"),
    ("index", "fp4.x", "fp4.e8m0_b32", "packed"),
    ("main", "fp4.x", "fp4.e4m3_b16", "packed"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "source", "group", "codes"), ROWS)
def test_stored_rows_are_recorded_codes_then_recorded_scales(
    ops: Operators, kernel_vectors: Recorded, kind: str, source: str, group: str, codes: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    fmt = RowFormat(kind, 128)  # type: ignore[arg-type]
    x = kernel_vectors[source].to(dtype)
    expected = torch.cat(
        [kernel_vectors[f"{group}.{part}"].view(torch.uint8) for part in (codes, "scale")], dim=-1
    )
    assert_same_bits(ops.pack_rows(x, fmt), expected)

    pool = torch.full((2 * len(x), fmt.row_bytes), 0xAA, dtype=torch.uint8)
    where = torch.arange(len(x)) * 2 + 1
    ops.store_rows(x, pool, where, fmt)
    assert_same_bits(pool[where], expected)
    assert (pool[where - 1] == 0xAA).all()
    # Only to bfloat16, which the recording is in: the sign of an overflow survives, its size not.
    restored = ops.load_rows(pool, where, fmt)
    assert restored.dtype == torch.float32
    assert_same_bits(restored.to(torch.bfloat16), kernel_vectors[f"{group}.qdq"])


@pytest.mark.parametrize("case", ["fp8_a", "fp8_b", "fp8_c", "fp4_a", "fp4_b", "fp4_c"])
def test_quantised_products_match_the_recorded_ones(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    x = kernel_vectors[f"gemm.{case}.x"]
    weight = Weight(kernel_vectors[f"gemm.{case}.w"], kernel_vectors[f"gemm.{case}.w_scale"])
    assert_bf16(ops.linear(x, weight), kernel_vectors[f"gemm.{case}.out_bf16"])
    # float32 activations are quantised to the same codes; the sum is then not rounded.
    assert_f32(ops.linear(x.float(), weight), kernel_vectors[f"gemm.{case}.out_f32"])


def test_weights_dequantise_exactly_to_bfloat16(kernel_vectors: Recorded) -> None:
    for case in ("fp8_a", "fp4_b"):
        weight = kernel_vectors[f"gemm.{case}.w"].view(torch.uint8)
        scale = kernel_vectors[f"gemm.{case}.w_scale"].view(torch.uint8)
        decode = codec.decode_fp8_weight if case == "fp8_a" else codec.decode_fp4_weight
        values = decode(weight, scale)
        assert torch.equal(values, values.to(torch.bfloat16).float())


def test_rms_norm_matches_the_recorded_one_and_keeps_zero_rows(
    ops: Operators, kernel_vectors: Recorded
) -> None:
    x, weight = kernel_vectors["rmsnorm.x"], kernel_vectors["rmsnorm.weight"]
    assert_bf16(ops.rms_norm(x, weight, 1e-20), kernel_vectors["rmsnorm.out"])
    assert_f32(
        ops.rms_norm(x.float(), weight, 1e-20), kernel_vectors["rmsnorm.out_f32"], relative=1e-6
    )
    zero_rows = (x == 0).all(-1)
    assert zero_rows.any()
    assert (ops.rms_norm(x, weight, 1e-20)[zero_rows] == 0).all()
