"""Rounding to the stored number formats as arithmetic: what the codec does to codes, without codes.

Equal to `formats/codec.py` bit for bit (tested); written so that it compiles to vector code, because
the anneal phase rounds every weight and activation in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.codec import ACT_AMAX_FLOOR, E2M1_MAX, E4M3_MAX, INDEX_AMAX_FLOOR


def _pow2_at_least(x: Tensor) -> Tensor:
    """Smallest power of two >= x, float32 x >= 2^-126, decided on the bits."""
    bits = x.view(torch.int32)
    return (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)


def _pow2_at_most(x: Tensor) -> Tensor:
    """Largest power of two <= x, float32 x >= 2^-126."""
    return ((x.view(torch.int32) >> 23) << 23).view(torch.float32)


def _scale(amax: Tensor, limit: float) -> Tensor:
    smallest = 2.0**-126
    return _pow2_at_least((amax * torch.tensor(1 / limit, dtype=torch.float32)).clamp(min=smallest))


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with sign; ties to the even code; saturating."""
    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value, ties to even, saturating at +-448."""
    size = x.abs().clamp(max=E4M3_MAX)
    step = _pow2_at_most(size.clamp(min=2.0**-6)) * 0.125
    return torch.copysign(torch.round(size / step) * step, x)


def fake_fp4(x: Tensor) -> Tensor:
    """E2M1 with one power-of-two scale per 32 values of the last axis; x's dtype."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=INDEX_AMAX_FLOOR)
    scale = _scale(amax, E2M1_MAX)
    return (round_e2m1(groups / scale) * scale).flatten(-2).to(x.dtype)


def fake_act(x: Tensor) -> Tensor:
    """E4M3 with one power-of-two scale per 32 values of the last axis; x's dtype."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=ACT_AMAX_FLOOR)
    scale = _scale(amax, E4M3_MAX)
    return (round_e4m3(groups / scale) * scale).flatten(-2).to(x.dtype)


def fake_fp8_tiles(x: Tensor) -> Tensor:
    """E4M3 with one power-of-two scale per 32 x 32 tile of `[out, in]`, multiples of 32."""
    tiles = x.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    amax = tiles.abs().amax((1, 3), keepdim=True).clamp(min=ACT_AMAX_FLOOR)
    scale = _scale(amax, E4M3_MAX)
    return (round_e4m3(tiles / scale) * scale).flatten(2, 3).flatten(0, 1).to(x.dtype)
