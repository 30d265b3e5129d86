"""How close is close: the comparisons of the parity tests. No tests here."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_bf16(actual: Tensor, expected: Tensor, *, ulps: float = 1) -> None:
    """At most `ulps` bfloat16 steps of the largest magnitude of `expected` away from it."""
    assert actual.dtype == torch.bfloat16
    assert actual.shape == expected.shape
    top = expected.float().abs().max()
    step = 2.0 ** (torch.floor(torch.log2(top)) - 7)
    worst = (actual.float() - expected.float()).abs().max()
    assert worst <= ulps * step, f"off by {worst:.3g}, {worst / step:.1f} steps of {step:.3g}"


def assert_f32(actual: Tensor, expected: Tensor, *, relative: float = 1e-5) -> None:
    """Within `relative` of the largest magnitude of `expected`."""
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    worst = (actual - expected).abs().max()
    assert worst <= relative * expected.abs().max(), f"off by {worst:.3g}"


def assert_within(actual: Tensor, expected: Tensor, limit: float) -> None:
    """No element further than `limit` from `expected`."""
    assert actual.shape == expected.shape
    assert actual.numel()
    worst = (actual.float() - expected.float()).abs().max()
    assert worst <= limit, f"off by {worst:.3g}, allowed {limit:.3g}"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal to the bit, the sign of zero included."""
    assert actual.shape == expected.shape
    assert torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Largest error of each row, over the last axis, as one flat tensor."""
    assert actual.shape == expected.shape
    return (actual.float() - expected.float()).abs().amax(-1).flatten()
