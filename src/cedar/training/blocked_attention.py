"""Attention of a training step: windows in blocks, compressed rows densely masked, one sink per head.

A block of W queries (W = the window) sees the rows of its own and of the previous block, so window
scores cost 2 W per query instead of T. Keys equal values and are shared by all heads, so heads and
queries form one matrix axis. Called by `rows.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.training.kernels import Kernels
from cedar.training.native_step import NativeStep


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


#: Query blocks that share one product with the compressed rows; rows after the last of them are
#: invisible to all and are left out.
_CHUNK_BLOCKS = 4


class _NativeAttention(torch.autograd.Function):
    """The same with the softmax in place and without the invisible triangle."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, near: Tensor, far: Tensor | None, sink: Tensor, far_mask: Tensor | None,
        seen: Tensor, shape: BlockShape, native: NativeStep,
    ) -> Tensor:  # fmt: skip
        width, heads = q.shape[-1], shape.heads
        paired = _paired(near, shape)
        by_block = q.reshape(shape.batch * shape.blocks, shape.window * heads, width)
        p_near = torch.bmm(by_block, paired.transpose(1, 2))
        flat_near = p_near.view(-1, 2 * shape.window)
        flat_q = by_block.view(-1, width)
        p_sink = torch.empty(flat_q.shape[0], dtype=torch.float32)
        parts: list[Tensor] = []
        limits = seen.tolist()
        for b, first, last in _chunks(shape):
            rows = slice((b * shape.length + first) * heads, (b * shape.length + last) * heads)
            part, mask = None, None
            if far is not None and far_mask is not None:
                part = flat_q[rows] @ far[b, : limits[last - 1]].t()
                mask = far_mask[b % far_mask.shape[0], first:last]
                parts.append(part)
            native.softmax(
                flat_near[rows], part, mask, seen[first:last], sink, p_sink[rows], heads=heads,
                window=shape.window, first_block=first // shape.window, scale=shape.scale,
            )  # fmt: skip
        out = torch.bmm(p_near, paired).view(-1, width)
        for part, (b, first, last) in zip(parts, _chunks(shape), strict=False):
            assert far is not None
            rows = slice((b * shape.length + first) * heads, (b * shape.length + last) * heads)
            torch.addmm(out[rows], part, far[b, : part.shape[1]], out=out[rows])
        out = out.view(q.shape)
        ctx.save_for_backward(q, paired, far, p_near, p_sink, out, *parts)
        ctx.shape, ctx.native = shape, native
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, paired, far, p_near, p_sink, out, *parts = ctx.saved_tensors
        shape, native, width = ctx.shape, ctx.native, q.shape[-1]
        heads = shape.heads
        grad = grad.contiguous()
        dot = (grad.float() * out.float()).sum(-1).flatten()
        by_block, grad_block = (
            q.reshape(*p_near.shape[:2], width),
            grad.view(*p_near.shape[:2], width),
        )
        ds = torch.bmm(grad_block, paired.transpose(1, 2))
        native.softmax_backward(
            p_near.view(-1, 2 * shape.window), ds.view(-1, 2 * shape.window), dot, shape.scale
        )
        dq = torch.bmm(ds, paired).view(-1, width)
        d_paired = torch.bmm(ds.transpose(1, 2), by_block)
        d_paired = torch.baddbmm(d_paired, p_near.transpose(1, 2), grad_block)
        flat_q, flat_grad = by_block.view(-1, width), grad_block.view(-1, width)
        d_far = None if far is None else torch.zeros(far.shape, dtype=torch.float32)
        for part, (b, first, last) in zip(parts, _chunks(shape), strict=False):
            assert far is not None and d_far is not None
            rows = slice((b * shape.length + first) * heads, (b * shape.length + last) * heads)
            keys = far[b, : part.shape[1]]
            ds = flat_grad[rows] @ keys.t()
            native.softmax_backward(part, ds, dot[rows], shape.scale)
            torch.addmm(dq[rows], ds, keys, out=dq[rows])
            d_far[b, : part.shape[1]] += ds.t() @ flat_q[rows]
            d_far[b, : part.shape[1]] += part.t() @ flat_grad[rows]
        d_sink = -(p_sink * dot).view(-1, heads).sum(0)
        d_far = None if d_far is None else d_far.to(q.dtype)
        return dq.view(q.shape), _unpaired(d_paired, shape), d_far, d_sink, None, None, None, None


def _chunks(shape: BlockShape) -> list[tuple[int, int, int]]:
    """Sequence, first and one past the last query of every chunk."""
    size = _CHUNK_BLOCKS * shape.window
    return [
        (b, first, min(first + size, shape.length))
        for b in range(shape.batch)
        for first in range(0, shape.length, size)
    ]


def blocked_attention(
    q: Tensor, near: Tensor, far: Tensor | None, sink: Tensor, near_mask: Tensor,
    far_mask: Tensor | None, seen: Tensor, shape: BlockShape, kernels: Kernels,
) -> Tensor:  # fmt: skip
    """Attention over window rows and masked compressed rows, with gradients.

    Args:
        q: `[B, T, H, d]`.   near: `[B, T, d]`.   far: `[B, n, d]` or None.   sink: float32 `[H]`.
        near_mask: from `window_mask`.   far_mask: bool `[B or 1, T, n]`.
        seen: int32 `[T]`, leading rows of far that exist for each query.
    Returns: `[B, T, H, d]`.
    """
    if kernels.native is not None and q.dtype == torch.bfloat16:
        out = _NativeAttention.apply(q, near, far, sink, far_mask, seen, shape, kernels.native)
    else:
        out = _BlockedAttention.apply(q, near, far, sink, near_mask, far_mask, shape, kernels)
    assert isinstance(out, Tensor)
    return out
