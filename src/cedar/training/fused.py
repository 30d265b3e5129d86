"""The seams between sublayers, each as one function: expand, predict the next mixes, collapse, norm.

A sublayer's coefficients come from the stream at its entrance, so everything between two sublayers
depends on one freshly written stream and is computed while that is in cache. Called by `forward.py`.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """A sublayer about to run: its normed input and its coefficients (rows last)."""

    stream: Tensor
    u: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


def enter(stream: Tensor, pre: Tensor, weights: HyperWeights, shape: HyperShape) -> Sublayer:
    """First sublayer, from the embedded stream `[N, C, D]` and its pre mix `[C, N]`."""
    flat = stream.flatten(1)
    raw = F.linear(flat, weights.fn.to(flat.dtype))
    mixes = pieces.coefficients(
        raw, flat, weights.base, weights.scale, shape.copies, shape.iters, shape.eps, shape.norm_eps
    )
    u = pieces.collapse_norm(stream, pre, weights.norm, shape.norm_eps)
    return Sublayer(stream, u, *mixes)


def seam(y: Tensor, done: Sublayer, weights: HyperWeights, shape: HyperShape) -> Sublayer:
    """Add the output `y [N, D]` of a sublayer to the stream and prepare the next one."""
    stream = pieces.expand(y, done.stream, done.post, done.comb)
    return enter(stream, done.pre, weights, shape)


def leave(y: Tensor, done: Sublayer, norm: Tensor, norm_eps: float) -> Tensor:
    """Add the last output and collapse to the normed hidden rows `[N, D]`."""
    stream = pieces.expand(y, done.stream, done.post, done.comb)
    return pieces.collapse_norm(stream, done.pre, norm, norm_eps)
