"""Attention of a training step: windows in blocks, compressed rows densely masked, one sink per head.

A block of W queries (W = the window) sees the rows of its own and of the previous block, so window
scores cost 2 W per query instead of T. Keys equal values and are shared by all heads, so heads and
queries form one matrix axis. Called by `rows.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from cedar.training.kernels import Kernels


class BlockShape(NamedTuple):
    """Sizes of one call."""

    batch: int
    length: int
    heads: int
    window: int
    scale: float

    @property
    def blocks(self) -> int:
        """Query blocks of one sequence."""
        return self.length // self.window


def window_mask(shape: BlockShape) -> Tensor:
    """Bool `[1, blocks, W, 1, 2 W]`: columns are the previous block, then the query's own."""
    query = torch.arange(shape.window).unsqueeze(1)
    column = torch.arange(2 * shape.window)
    inside = (column > query) & (column <= query + shape.window)
    first = torch.arange(shape.blocks).view(-1, 1, 1) == 0
    return (inside & ~(first & (column < shape.window)))[None, :, :, None]


def _paired(rows: Tensor, shape: BlockShape) -> Tensor:
    """`[B, T, d]` to `[B * blocks, 2 W, d]`: previous block (zeros before the first), own block."""
    own = rows.unflatten(1, (shape.blocks, shape.window))
    previous = torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), 1)
    return torch.cat((previous, own), 2).flatten(0, 1)


def _unpaired(grad: Tensor, shape: BlockShape) -> Tensor:
    """Adjoint of `_paired`."""
    grad = grad.unflatten(0, (shape.batch, shape.blocks))
    own = grad[:, :, shape.window :].clone()
    own[:, :-1] += grad[:, 1:, : shape.window]
    return own.flatten(1, 2)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, near: Tensor, far: Tensor | None, sink: Tensor, near_mask: Tensor,
        far_mask: Tensor | None, shape: BlockShape, kernels: Kernels,
    ) -> Tensor:  # fmt: skip
        width = q.shape[-1]
        tiles = (shape.batch, shape.blocks, shape.window, shape.heads)
        paired = _paired(near, shape)
        by_block = q.reshape(shape.batch * shape.blocks, shape.window * shape.heads, width)
        near_scores = torch.bmm(by_block, paired.transpose(1, 2)).view(*tiles, -1)
        far_scores, far_mask_tiles = None, None
        by_sequence = q.reshape(shape.batch, shape.length * shape.heads, width)
        if far is not None and far_mask is not None:
            far_scores = torch.bmm(by_sequence, far.transpose(1, 2)).view(*tiles, -1)
            far_mask_tiles = far_mask.unflatten(1, (shape.blocks, shape.window)).unsqueeze(3)
        p_near, p_far, p_sink = kernels.joint_softmax(
            near_scores, far_scores, near_mask, far_mask_tiles, sink, shape.scale
        )
        out = torch.bmm(p_near.view(by_block.shape[0], by_block.shape[1], -1), paired)
        out = out.view(shape.batch, -1, width)
        if far is not None and p_far is not None:
            out = torch.baddbmm(out, p_far.view(shape.batch, by_sequence.shape[1], -1), far)
        out = out.view(q.shape)
        ctx.save_for_backward(q, paired, far, p_near, p_far, p_sink, out)
        ctx.shape, ctx.kernels = shape, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, paired, far, p_near, p_far, p_sink, out = ctx.saved_tensors
        shape, kernels = ctx.shape, ctx.kernels
        width = q.shape[-1]
        tiles = (shape.batch, shape.blocks, shape.window, shape.heads)
        grad = grad.contiguous()
        dot = (grad.float() * out.float()).sum(-1).view(tiles)
        rows = (shape.batch * shape.blocks, shape.window * shape.heads)
        by_block, grad_block = q.reshape(*rows, width), grad.view(*rows, width)
        dp = torch.bmm(grad_block, paired.transpose(1, 2)).view(p_near.shape)
        ds = kernels.softmax_grad(p_near, dp, dot, shape.scale).view(*rows, -1)
        dq = torch.bmm(ds, paired).view(shape.batch, -1, width)
        d_paired = torch.bmm(ds.transpose(1, 2), by_block)
        d_paired = torch.baddbmm(d_paired, p_near.view(*rows, -1).transpose(1, 2), grad_block)
        d_far = None
        if far is not None:
            by_sequence = q.reshape(shape.batch, -1, width)
            grad_sequence = grad.view(by_sequence.shape)
            dp = torch.bmm(grad_sequence, far.transpose(1, 2)).view(p_far.shape)
            ds = kernels.softmax_grad(p_far, dp, dot, shape.scale).view(*by_sequence.shape[:2], -1)
            dq = torch.baddbmm(dq, ds, far)
            d_far = torch.bmm(ds.transpose(1, 2), by_sequence)
            flat = p_far.view(*by_sequence.shape[:2], -1)
            d_far = torch.baddbmm(d_far, flat.transpose(1, 2), grad_sequence)
        d_sink = -(p_sink * dot).sum((0, 1, 2))
        return dq.view(q.shape), _unpaired(d_paired, shape), d_far, d_sink, None, None, None, None


def blocked_attention(
    q: Tensor, near: Tensor, far: Tensor | None, sink: Tensor, near_mask: Tensor,
    far_mask: Tensor | None, shape: BlockShape, kernels: Kernels,
) -> Tensor:  # fmt: skip
    """Attention over window rows and masked compressed rows, with gradients.

    Args:
        q: `[B, T, H, d]`.   near: `[B, T, d]`.   far: `[B, n, d]` or None.   sink: float32 `[H]`.
        near_mask: from `window_mask`.   far_mask: bool `[B or 1, T, n]`.
    Returns: `[B, T, H, d]`.
    """
    out = _BlockedAttention.apply(q, near, far, sink, near_mask, far_mask, shape, kernels)
    assert isinstance(out, Tensor)
    return out
