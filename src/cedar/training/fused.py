"""The seams between sublayers, each as one function: expand, predict the next mixes, collapse, norm.

A sublayer's coefficients come from the stream at its entrance, so everything between two sublayers
depends on one freshly written stream and is computed while that is in cache. Called by `forward.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cedar.training import pieces


class HyperWeights(NamedTuple):
    """Hyper-connection and norm parameters of one sublayer, float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


class HyperShape(NamedTuple):
    """Numbers of the config that the seams need."""

    copies: int
    iters: int
    eps: float
    norm_eps: float


class Sublayer(NamedTuple):
    """A sublayer about to run.

    Attributes:
        stream: `[N, C, D]`.   u: `[N, D]`, its normed input.
        mix: float32 `[N, C * (C + 2)]`: pre (for the next sublayer), post, comb of each row.
    """

    stream: Tensor
    u: Tensor
    mix: Tensor


def split_mix(mix: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows last: pre `[C, N]`, post `[C, N]`, comb `[C, C, N]`."""
    pre, post, comb = mix.t().split((copies, copies, copies * copies))
    return pre, post, comb.unflatten(0, (copies, copies))


def enter(stream: Tensor, pre: Tensor, weights: HyperWeights, shape: HyperShape) -> Sublayer:
    """First sublayer, from the embedded stream `[N, C, D]` and its pre mix `[C, N]`."""
    flat = stream.flatten(1)
    raw = F.linear(flat, weights.fn.to(flat.dtype))
    parts = pieces.coefficients(
        raw, flat, weights.base, weights.scale, shape.copies, shape.iters, shape.eps, shape.norm_eps
    )
    mix = torch.cat((parts[0], parts[1], parts[2].flatten(0, 1))).t().contiguous()
    u = pieces.collapse_norm(stream, pre, weights.norm, shape.norm_eps)
    return Sublayer(stream, u, mix)


def seam(y: Tensor, done: Sublayer, weights: HyperWeights, shape: HyperShape) -> Sublayer:
    """Add the output `y [N, D]` of a sublayer to the stream and prepare the next one."""
    pre, post, comb = split_mix(done.mix, shape.copies)
    return enter(pieces.expand(y, done.stream, post, comb), pre, weights, shape)


def leave(y: Tensor, done: Sublayer, norm: Tensor, shape: HyperShape) -> Tensor:
    """Add the last output and collapse to the normed hidden rows `[N, D]`."""
    pre, post, comb = split_mix(done.mix, shape.copies)
    stream = pieces.expand(y, done.stream, post, comb)
    return pieces.collapse_norm(stream, pre, norm, shape.norm_eps)
