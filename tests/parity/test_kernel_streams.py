"""Recorded hyper-connections and rotary tables."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_bf16, assert_f32, assert_within
from torch import Tensor

from cedar.kernels.operators import Mixes, Operators
from cedar.kernels.reference import split_mixes
from cedar.model.rotary import base_frequencies, yarn_frequencies

Recorded = dict[str, Tensor]


@pytest.mark.parametrize(
    ("case", "copies", "iters"), [("hc2", 2, 20), ("hc4", 4, 20), ("hc4_it3", 4, 3)]
)
def test_sinkhorn_coefficients_match_the_recorded_ones(
    kernel_vectors: Recorded, case: str, copies: int, iters: int
) -> None:
    group = {
        name.rsplit(".", 1)[1]: t
        for name, t in kernel_vectors.items()
        if name.startswith(f"sinkhorn.{case}.")
    }
    mixes = split_mixes(
        group["mixes"].flatten(0, 1), group["base"], group["scale"], copies=copies, iters=iters,
        eps=1e-6,
    )  # fmt: skip
    for name, actual in zip(("pre", "post", "comb"), mixes, strict=True):
        assert_within(actual, group[name].flatten(0, 1), 1e-6)


def test_printed_sinkhorn_example() -> None:
    """The worked example of the architecture's specification, appendix A.4."""
    raw = torch.zeros(1, 24)
    raw[0, 8:] = torch.tensor([2, 0, 0, 0, 0, 3, 0, 0, 1, 0, 0, -1, 0, 0, -2, 4.0])
    mixes = split_mixes(raw, torch.zeros(24), torch.ones(3), copies=4, iters=20, eps=1e-6)
    printed = torch.tensor(
        [
            [0.5774495, 0.0733216, 0.3102839, 0.0393979],
            [0.0411424, 0.7752939, 0.1633501, 0.0207412],
            [0.3481220, 0.1201549, 0.5084735, 0.0237515],
            [0.0332850, 0.0312286, 0.0178915, 0.9161085],
        ]
    )
    assert_within(mixes.comb[0], printed, 1e-6)
    assert_within(mixes.pre, torch.full((1, 4), 0.500001), 1e-7)
    assert_within(mixes.post, torch.ones(1, 4), 1e-7)


def hc_inputs(recorded: Recorded) -> tuple[Tensor, Mixes]:
    mixes = Mixes(*(recorded[f"hc.{name}"].flatten(0, 1) for name in ("pre", "post", "comb")))
    return recorded["hc.x"].flatten(0, 1), mixes


def test_mixes_predicted_from_a_stream_match_the_recorded_ones(
    ops: Operators, kernel_vectors: Recorded
) -> None:
    stream, expected = hc_inputs(kernel_vectors)
    mixes = ops.hc_mixes(
        stream, kernel_vectors["hc.fn"], kernel_vectors["hc.base"], kernel_vectors["hc.scale"],
        iters=20, eps=1e-6, norm_eps=1e-20,
    )  # fmt: skip
    for actual, wanted in zip(mixes, expected, strict=True):
        assert actual.dtype == torch.float32
        assert_within(actual, wanted, 1e-6)


def test_collapse_matches_the_recorded_one(ops: Operators, kernel_vectors: Recorded) -> None:
    stream, mixes = hc_inputs(kernel_vectors)
    assert_bf16(ops.hc_collapse(stream, mixes.pre), kernel_vectors["hc.collapsed"].flatten(0, 1))
    assert_f32(
        ops.hc_collapse(stream.float(), mixes.pre), kernel_vectors["hc.collapsed_f32"].flatten(0, 1)
    )


def test_expand_matches_the_recorded_one(ops: Operators, kernel_vectors: Recorded) -> None:
    stream, mixes = hc_inputs(kernel_vectors)
    y = kernel_vectors["hc.sublayer_out"].flatten(0, 1)
    assert_bf16(ops.hc_expand(y, stream, mixes), kernel_vectors["hc.expanded"].flatten(0, 1))
    assert_f32(
        ops.hc_expand(y.float(), stream.float(), mixes),
        kernel_vectors["hc.expanded_f32"].flatten(0, 1),
    )


def test_comb_carries_the_first_index_into_the_second(ops: Operators) -> None:
    """One-hot copies and an asymmetric matrix tell source from destination (regression class: the
    mix taken along the wrong axis)."""
    comb = torch.arange(16.0).view(1, 4, 4) + 1
    for source in range(4):
        stream = torch.zeros(1, 4, 32)
        stream[0, source] = 1.0
        mixes = Mixes(torch.zeros(1, 4), torch.zeros(1, 4), comb)
        out = ops.hc_expand(torch.zeros(1, 32), stream, mixes)
        assert torch.equal(out[0, :, 0], comb[0, source])


ROPE = ["plain16", "plain64", "yarn16_tiny", "yarn32_mid", "yarn64_released"]


@pytest.mark.parametrize("case", ROPE)
def test_rotary_tables_match_the_recorded_ones_up_to_a_million(
    kernel_vectors: Recorded, case: str
) -> None:
    params = kernel_vectors[f"rope.{case}.params"].tolist()
    dim, original, theta, factor, fast, slow = params
    frequencies = base_frequencies(dim, theta)
    if original:
        frequencies = yarn_frequencies(
            dim, theta, factor=factor, beta_fast=fast, beta_slow=slow, original=original
        )
    angles = kernel_vectors[f"rope.{case}.positions"].float().unsqueeze(1) * frequencies
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)
    assert_within(table, kernel_vectors[f"rope.{case}.cos_sin"], 1e-6)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", ["x3", "x4"])
def test_rotation_matches_the_recorded_one(
    ops: Operators, kernel_vectors: Recorded, name: str, inverse: bool
) -> None:
    x = kernel_vectors[f"rope.apply.{name}"]
    table = kernel_vectors["rope.apply.cos_sin"].repeat(x.shape[0], 1, 1)
    expected = kernel_vectors[f"rope.apply.{name}_{'inv' if inverse else 'rot'}"].flatten(0, 1)
    assert_bf16(ops.rotate(x.flatten(0, 1), table, inverse=inverse), expected)


def test_rotation_turns_the_last_values_only_and_its_inverse_undoes_it(ops: Operators) -> None:
    """Also guards against a rotation applied on one side only (regression class: gibberish with a
    quantised cache)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 2, 48, generator=generator)
    angles = torch.randn(7, 8, generator=generator)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)
    turned = ops.rotate(x, table)
    assert torch.equal(turned[..., :-16], x[..., :-16])
    assert (turned[..., -16:] - x[..., -16:]).abs().amax(-1).min() > 0.01
    assert_within(ops.rotate(turned, table, inverse=True), x, 1e-6)
    before = torch.einsum("nhd,nhd->nh", x, x.flip(1))
    after = torch.einsum("nhd,nhd->nh", turned, turned.flip(1))
    assert_within(after, before, 1e-5)
