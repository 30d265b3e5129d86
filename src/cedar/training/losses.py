"""Losses of a training step: next-token cross entropy in chunks, and the index branch's KL.

Called by `trainer.py` and `rows.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.training.kernels import Kernels

#: Rows whose logits exist at one time: 1,024 x 4,096 bfloat16 logits are 8 MB.
_CHUNK = 1024


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, kernels: Kernels
    ) -> Tensor:
        count = hidden.shape[0]
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros(head.shape, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            loss, grad = kernels.cross_entropy(hidden[part] @ head.t(), targets[part])
            total += loss.sum()
            torch.mm(grad, head, out=d_hidden[part])
            d_head += grad.t() @ hidden[part]
        ctx.save_for_backward(d_hidden, d_head)
        ctx.count = count
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        factor = grad / ctx.count
        return d_hidden * factor.to(d_hidden.dtype), (d_head * factor), None, None


def chunked_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, kernels: Kernels
) -> Tensor:
    """Mean next-token loss in nats; the logits of all rows never exist at once.

    Args:
        hidden: `[N, D]`, normed.   head: float32 `[V, D]`.   targets: int64 `[N]`.
    """
    loss = _ChunkedCrossEntropy.apply(hidden, _Rounded.apply(head, hidden.dtype), targets, kernels)
    assert isinstance(loss, Tensor)
    return loss


class _Rounded(torch.autograd.Function):
    """Cast whose gradient stays in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


def index_loss(student: Tensor, teacher: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || softmax(student)) over the allowed rows.

    Args:
        student: float32 index scores `[M, n]`.   teacher: float32 `[M, n]`, the attention mass of
            each compressed row summed over heads, not normalised.   allowed: bool `[M, n]`.
    Returns: the mean over queries that have a choice (more than one allowed row) and attend to
        compressed rows at all, and the number of those queries.
    """
    mass = (teacher * allowed).sum(-1, keepdim=True)
    target = teacher * allowed / mass.clamp(min=1e-20)
    log_q = torch.log_softmax(student.masked_fill(~allowed, -1e30), -1)
    terms = torch.where(target > 0, target * (target.clamp(min=1e-20).log() - log_q), 0.0)
    counted = (allowed.sum(-1) > 1) & (mass.squeeze(-1) > 1e-3)
    rows = counted.sum().clamp(min=1)
    return (terms.sum(-1) * counted).sum() / rows, rows
