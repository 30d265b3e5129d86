"""Routed experts of a training step: rows sorted by expert once, one product per expert.

Called by `operators.py`. The sum over a row's experts is taken in float32, as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.training.kernels import Kernels

#: Rows per expert are padded to a multiple of this: matrix libraries build code per shape, and
#: building it for every new row count took half of a step.
_ALIGN = 128


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, down: Tensor, limit: float,
        packed: bool, kernels: Kernels,
    ) -> Tensor:  # fmt: skip
        per_row = chosen.shape[1]
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        filled = torch.bincount(flat, minlength=up.shape[0])
        padded = (filled + _ALIGN - 1) // _ALIGN * _ALIGN
        shift = (padded.cumsum(0) - padded) - (filled.cumsum(0) - filled)
        sorted_place = torch.arange(order.shape[0]) + shift.repeat_interleave(filled)
        # Fixed in length, so that compiled pieces see one shape; padding reads row 0 with weight 0.
        slots = order.shape[0] + _ALIGN * up.shape[0]
        rows = order.new_zeros(slots).scatter_(0, sorted_place, order // per_row)
        route = weights.new_zeros(slots).scatter_(0, sorted_place, weights.flatten()[order])
        place = torch.empty_like(order)
        place[order] = sorted_place
        counts: list[int] = padded.tolist()
        sorted_x = x[rows]
        h = x.new_zeros(slots, up.shape[1])
        _products(sorted_x, up.transpose(1, 2), counts, h)
        hidden = kernels.swiglu(h, route, limit)
        if packed:
            hidden = kernels.fake_act(hidden)
        y = x.new_empty(slots, down.shape[1])
        _products(hidden, down.transpose(1, 2), counts, y)
        out = y[place].view(x.shape[0], per_row, -1).sum(1)
        ctx.save_for_backward(sorted_x, route, rows, place, h, hidden, up, down)
        ctx.counts, ctx.limit, ctx.kernels, ctx.per_row = counts, limit, kernels, per_row
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sorted_x, route, rows, place, h, hidden, up, down = ctx.saved_tensors
        counts = ctx.counts
        dy = grad[rows]
        d_hidden = torch.zeros_like(hidden)
        _products(dy, down, counts, d_hidden)
        d_down = _weight_grads(dy, hidden, counts, down)
        dh, d_route = ctx.kernels.swiglu_grad(h, route, d_hidden, ctx.limit)
        d_up = _weight_grads(dh, sorted_x, counts, up)
        dx = torch.empty_like(sorted_x)
        _products(dh, up, counts, dx)
        dx = dx[place].view(-1, ctx.per_row, dx.shape[-1]).sum(1)
        return dx, d_route[place].view(-1, ctx.per_row), None, d_up, d_down, None, None, None


def _products(x: Tensor, weight: Tensor, counts: list[int], out: Tensor) -> None:
    """`out[group e] = x[group e] @ weight[e]` for consecutive groups of rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(x[start : start + count], weight[expert], out=out[start : start + count])
        start += count


def _weight_grads(dy: Tensor, x: Tensor, counts: list[int], like: Tensor) -> Tensor:
    """`dy[group e]^T @ x[group e]` per expert."""
    grads = torch.zeros_like(like)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            torch.mm(dy[part].t(), x[part], out=grads[expert])
        start += count
    return grads


def grouped_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, down: Tensor, limit: float,
    packed: bool, kernels: Kernels,
) -> Tensor:  # fmt: skip
    """Sum of each row's experts.

    Args:
        x: `[N, D]`.   weights: float32 `[N, k]`.   chosen: int64 `[N, k]`.
        up: `[E, 2 I, D]`, gate rows then up rows.   down: `[E, D, I]`.
        packed: round the hidden rows to E4M3 before `down`, straight through.
    """
    out = _GroupedExperts.apply(x, weights, chosen, up, down, limit, packed, kernels)
    assert isinstance(out, Tensor)
    return out
