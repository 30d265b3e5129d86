"""Which rotary table each layer uses, against a table written from the config."""

from __future__ import annotations

import math

import pytest
import torch

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.model.rotary import Rotary, RotaryTables, yarn_frequencies
from cedar.model.spans import Spans


def frequencies(config: ModelConfig, *, compressed: bool) -> list[float]:
    """Ten lines from the specification, section 4.4, in plain floats."""
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    base = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if not compressed:
        return base
    original, ln = config.rope_original_max_position_embeddings, math.log(theta)

    def correction(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * ln)

    low = max(math.floor(correction(config.rope_beta_fast)), 0)
    high = min(math.ceil(correction(config.rope_beta_slow)), dim - 1)
    ramp = [min(max((i - low) / max(high - low, 1e-3), 0), 1) for i in range(dim // 2)]
    return [f * (1 - r) + f / config.rope_factor * r for f, r in zip(base, ramp, strict=True)]


@pytest.mark.parametrize("name", ["v4.1-flash", "nano", "tiny"])
def test_window_layers_and_compressed_layers_rotate_by_their_own_table(name: str) -> None:
    """Positions up to 4096 (regression class: right up to the window, wrong beyond it)."""
    config = preset(name)
    rotary = Rotary(config)
    positions = torch.tensor([0, 1, 127, 128, 4096])
    for spec in config.plan.layers:
        table = rotary.cos_sin(spec, positions)
        wanted = torch.tensor(frequencies(config, compressed=spec.role != "window"))
        angles = positions.double().unsqueeze(1) * wanted.double()
        expected = torch.stack((angles.cos(), angles.sin()), -1).float()
        # The table is built from float32 products: 4096 times a half ulp of one.
        assert (table - expected).abs().max() < 5e-4
    window, reader = rotary.plain, rotary.yarn
    assert not torch.allclose(window, reader)


def test_released_yarn_table_is_the_printed_one() -> None:
    """Appendix A.1 of the specification, the pairs around the blended band."""
    config = preset("v4.1-flash")
    table = Rotary(config).yarn
    printed = {
        0: 1.0, 1: 6.876560219e-1, 8: 5.0e-2, 15: 3.635538584e-3, 16: 2.265625000e-3,
        19: 5.080819630e-4, 22: 9.086784295e-5, 24: 1.953125000e-5, 25: 5.372312671e-6,
        26: 3.694303160e-6, 31: 5.680529037e-7,
    }  # fmt: skip
    for pair, value in printed.items():
        assert float(table[pair]) == pytest.approx(value, rel=1e-6)


def test_yarn_is_applied_to_short_sequences_too_and_has_no_temperature() -> None:
    """Position 1 already turns by the blended frequency, and rotation keeps lengths."""
    config = preset("v4.1-flash")
    spec = config.plan[2]
    table = Rotary(config).cos_sin(spec, torch.tensor([1]))
    slow = 5.680529037e-7
    assert float(table[0, 31, 1]) == pytest.approx(slow, rel=1e-5)
    assert torch.allclose(table.square().sum(-1), torch.ones(1, 32), atol=1e-6)


def test_angles_are_float32_products() -> None:
    """At a million, float64 angles would differ visibly; the reference program rounds the product."""
    config = preset("v4.1-flash")
    rotary = Rotary(config)
    table = rotary.cos_sin(config.plan[2], torch.tensor([1_048_575]))
    product = (torch.tensor(1_048_575.0) * rotary.yarn).double()
    assert torch.allclose(table[0, :, 0].double(), product.cos(), atol=1e-6)
    exact = 1_048_575 * rotary.yarn.double()
    assert (exact.cos() - product.cos()).abs().max() > 1e-3


def test_compressed_rows_sit_at_the_first_token_of_their_group() -> None:
    config = preset("tiny")
    rotary = Rotary(config)
    tables = RotaryTables(rotary)
    spec = config.plan[1]
    groups = torch.tensor([0, 2, 4])
    assert torch.equal(tables.at(spec, groups), rotary.cos_sin(spec, groups))
    spans = Spans((0, 1), (0, 5), (3, 2))
    assert torch.equal(
        tables.rows(spec, spans), rotary.cos_sin(spec, torch.tensor([0, 1, 2, 5, 6]))
    )


def test_a_wider_band_than_the_table_is_clipped() -> None:
    plain = yarn_frequencies(8, 1e4, factor=4, beta_fast=32, beta_slow=1, original=8)
    assert torch.isfinite(plain).all()
    assert (plain > 0).all()
