"""Norm, rotation, hyper-connections and pooling of the native library, every variant.

Recorded vectors, and the promise that a row's bits do not depend on how many rows are in the call: the
kernels take other ways for one row, for a few and for many.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import DTYPES, draw, library_or_skip, same_bits
from torch import Tensor

from cedar.kernels.native.operators import NativeOperators
from cedar.kernels.operators import Mixes
from cedar.kernels.reference import ReferenceOperators

LIBRARY = library_or_skip()
REFERENCE = ReferenceOperators()
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
EXAMPLES = settings(max_examples=20, deadline=None)
Recorded = dict[str, Tensor]


def one_rounding(ours: Tensor, recorded: Tensor) -> bool:
    """Within one bfloat16 step of every value."""
    step = 2.0**-7 * recorded.float().abs() + 1e-30
    return bool(((ours.float() - recorded.float()).abs() <= step).all())


def test_recorded_norm(native: NativeOperators, kernel_vectors: Recorded) -> None:
    x, weight = kernel_vectors["rmsnorm.x"], kernel_vectors["rmsnorm.weight"]
    wide = native.rms_norm(x.float(), weight, 1e-20)
    assert torch.allclose(wide, kernel_vectors["rmsnorm.out_f32"], rtol=1e-6, atol=1e-6)
    assert one_rounding(native.rms_norm(x, weight, 1e-20), kernel_vectors["rmsnorm.out"])


@pytest.mark.parametrize("name", ["x3", "x4"])
def test_recorded_rotation(native: NativeOperators, kernel_vectors: Recorded, name: str) -> None:
    table = kernel_vectors["rope.apply.cos_sin"]
    for batch in range(2):
        for inverse, suffix in ((False, "rot"), (True, "inv")):
            ours = native.rotate(
                kernel_vectors[f"rope.apply.{name}"][batch].contiguous(), table, inverse=inverse
            )
            assert one_rounding(ours, kernel_vectors[f"rope.apply.{name}_{suffix}"][batch])


@EXAMPLES
@given(pairs=st.integers(1, 40), head=st.integers(0, 9), count=st.integers(1, 5),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), inverse=st.booleans())  # fmt: skip
def test_rotation_in_place_is_exact_float32_arithmetic_rounded_once(
    native: NativeOperators, pairs: int, head: int, count: int, dtype: torch.dtype, inverse: bool
) -> None:
    x, table = draw(1, count, 3, head + 2 * pairs).to(dtype), draw(2, count, pairs, 2)
    expected = REFERENCE.rotate(x, table, inverse=inverse)
    LIBRARY.call(
        "rotate", x.data_ptr(), DTYPES[dtype], count, 3, x.shape[-1], table.data_ptr(), 2 * pairs,
        int(inverse), x.data_ptr(), 2,
    )  # fmt: skip
    assert same_bits(x, expected)


def test_rotation_keeps_nan_and_infinity(native: NativeOperators) -> None:
    x = torch.tensor([[float("nan"), 1.0] + [1.0, float("inf")] * 15], dtype=torch.bfloat16)
    table = torch.ones(1, 16, 2)
    ours = native.rotate(x, table)[0]
    assert ours[:2].isnan().all()
    assert torch.equal(ours[2::2], torch.full((15,), float("-inf"), dtype=torch.bfloat16))


def test_recorded_hyper_connections(native: NativeOperators, kernel_vectors: Recorded) -> None:
    get = {n: kernel_vectors[f"hc.{n}"] for n in ("x", "fn", "base", "scale", "sublayer_out")}
    stream = get["x"].flatten(0, 1)
    mixes = native.hc_mixes(
        stream, get["fn"], get["base"], get["scale"], iters=20, eps=1e-6, norm_eps=1e-20
    )
    for name, ours in zip(("pre", "post", "comb"), mixes, strict=True):
        recorded = kernel_vectors[f"hc.{name}"].flatten(0, 1)
        assert torch.allclose(ours, recorded, rtol=0, atol=2e-6)
    recorded = Mixes(*(kernel_vectors[f"hc.{n}"].flatten(0, 1) for n in ("pre", "post", "comb")))
    y = get["sublayer_out"].flatten(0, 1)
    collapsed = native.hc_collapse(stream.float(), recorded.pre)
    expanded = native.hc_expand(y.float(), stream.float(), recorded)
    for name, wide in (("collapsed", collapsed), ("expanded", expanded)):
        expected = kernel_vectors[f"hc.{name}_f32"].flatten(0, 1)
        assert torch.allclose(wide, expected, rtol=1e-5, atol=1e-6)
    assert one_rounding(
        native.hc_collapse(stream, recorded.pre), kernel_vectors["hc.collapsed"].flatten(0, 1)
    )


@pytest.mark.parametrize(
    ("case", "copies", "iters"), [("hc2", 2, 20), ("hc4", 4, 20), ("hc4_it3", 4, 3)]
)
def test_recorded_sinkhorn(
    native: NativeOperators, kernel_vectors: Recorded, case: str, copies: int, iters: int
) -> None:
    # Row r of the stream is 16 at input r of 256: its root mean square is 1 and it picks column r of fn.
    recorded = {n: kernel_vectors[f"sinkhorn.{case}.{n}"]
                for n in ("mixes", "base", "scale", "pre", "post", "comb")}  # fmt: skip
    raw = recorded["mixes"].flatten(0, 1)
    count, mixes = raw.shape
    stream = torch.zeros(count, copies, 256 // copies)
    stream.view(count, -1).diagonal().fill_(16.0)
    fn = torch.zeros(mixes, 256)
    fn[:, :count] = raw.T / 16
    for rows in (slice(0, count), slice(0, 1)):
        ours = native.hc_mixes(
            stream[rows], fn, recorded["base"], recorded["scale"], iters=iters, eps=1e-6,
            norm_eps=0.0,
        )  # fmt: skip
        for name, actual in zip(("pre", "post", "comb"), ours, strict=True):
            expected = recorded[name].flatten(0, 1)[rows]
            assert torch.allclose(actual, expected, rtol=2e-6, atol=2e-6)


@BOTH
@pytest.mark.parametrize("copies", [1, 2, 3, 4, 8])
def test_hyper_connections_of_a_row_do_not_see_the_batch(
    native: NativeOperators, copies: int, dtype: torch.dtype
) -> None:
    width = 130
    stream, y = draw(1, 40, copies, width).to(dtype), draw(2, 40, width).to(dtype)
    mixes_count = copies * (copies + 2)
    fn, base = draw(3, mixes_count, copies * width) * 0.1, draw(4, mixes_count)
    scale, norm = draw(5, 3), draw(6, width).to(dtype)

    def run(rows: slice) -> tuple[Tensor, ...]:
        mixes = native.hc_mixes(stream[rows], fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-20)
        collapsed = native.collapse_norm(stream[rows], mixes.pre, norm, 1e-20)
        return *mixes, collapsed, native.hc_expand(y[rows], stream[rows], mixes)

    whole = run(slice(0, 40))
    for rows in (slice(0, 1), slice(7, 9), slice(30, 33), slice(16, 33)):
        for part, all_rows in zip(run(rows), whole, strict=True):
            assert same_bits(part, all_rows[rows])


def test_collapse_then_norm_is_the_fused_call(native: NativeOperators) -> None:
    stream, pre = draw(1, 9, 4, 70).bfloat16(), draw(2, 9, 4)
    weight = draw(3, 70).bfloat16()
    apart = native.rms_norm(native.hc_collapse(stream, pre), weight, 1e-20)
    assert same_bits(native.collapse_norm(stream, pre, weight, 1e-20), apart)


@pytest.mark.parametrize("case", ["r2_L1", "r2_L2", "r2_L7", "r2_L8", "r4_L6"])
def test_recorded_pooling(native: NativeOperators, kernel_vectors: Recorded, case: str) -> None:
    get = {n: kernel_vectors[f"compressor.{case}.{n}"]
           for n in ("x", "wkv", "wgate", "norm", "latents")}  # fmt: skip
    ratio, count = int(case[1]), get["latents"].shape[1]
    for batch in range(2):
        x = get["x"][batch, : ratio * count].float()
        kv, gate = (x @ get[n].float().T for n in ("wkv", "wgate"))
        pooled = native.pool_groups(kv.unflatten(0, (-1, ratio)), gate.unflatten(0, (-1, ratio)))
        ours = native.rms_norm(pooled.bfloat16(), get["norm"], 1e-20).float()
        recorded = get["latents"][batch].float()
        assert (ours - recorded).abs().max() <= 2.0**-7 * recorded.abs().max()


def test_pooling_survives_gates_that_overflow_exp(native: NativeOperators) -> None:
    gate = torch.tensor([[[1000.0] * 40, [-1000.0] * 40]])
    kv = torch.stack((torch.full((40,), 2.0), torch.full((40,), 7.0)))[None]
    assert torch.equal(native.pool_groups(kv, gate), torch.full((1, 40), 2.0))
