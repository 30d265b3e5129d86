"""Element-wise and reducing pieces of the training step: pure functions of tensors, nothing stored.

Each is written so that `torch.compile` turns it into one or two passes over memory; without a
compiler it runs as it stands. Called by `fused.py`, `grouped_experts.py`, `blocked_attention.py`
and `operators.py`; the meaning of every formula is `kernels/reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight`, float32 inside, x's dtype out."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the tail of `x [N, ..., d]` by angles `[N, ..., rope / 2]`."""
    rope = 2 * cos.shape[-1]
    head, tail = x[..., :-rope], x[..., -rope:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((head, turned.flatten(-2).to(x.dtype)), dim=-1)


def coefficients(
    raw: Tensor, flat: Tensor, base: Tensor, scale: Tensor, copies: int, iters: int, eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Hyper-connection coefficients with rows last: pre `[C, N]`, post `[C, N]`, comb `[C, C, N]`.

    Rows are the contiguous axis, so every step of the Sinkhorn iteration is a plain vector loop.

    Args:
        raw: `[N, C * (C + 2)]`, the product of the stream with `fn`.   flat: `[N, C * D]`.
    """
    rho = torch.rsqrt(flat.float().square().mean(-1) + norm_eps)
    mixes = raw.float().t() * rho
    factor = torch.cat(
        (scale[0].expand(copies), scale[1].expand(copies), scale[2].expand(copies**2))
    )
    mixes = mixes * factor[:, None] + base[:, None]
    pre = torch.sigmoid(mixes[:copies]) + eps
    post = 2 * torch.sigmoid(mixes[copies : 2 * copies])
    comb = mixes[2 * copies :].unflatten(0, (copies, copies))
    comb = torch.exp(comb - comb.amax(1, keepdim=True).detach())
    comb = comb / comb.sum(1, keepdim=True) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return pre, post, comb


def collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(sum_c pre[c] * stream[:, c])`: `[N, C, D]`, `[C, N]` -> `[N, D]`."""
    total = (pre.t().unsqueeze(-1) * stream.float()).sum(1).to(stream.dtype)
    return rms_norm(total, weight, eps)


def expand(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`post[j] * y + sum_i comb[i, j] * stream[:, i]`: `[N, D]`, `[N, C, D]` -> `[N, C, D]`."""
    wide = stream.float()
    weights = comb.permute(2, 0, 1)
    mixed = (weights.unsqueeze(-1) * wide.unsqueeze(2)).sum(1)
    return (post.t().unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(stream.dtype)


def swiglu(h: Tensor, route: Tensor, limit: float) -> Tensor:
    """`silu(gate) * up * route` of `h [M, 2 I]` (gate, then up), clamped; `[M, I]` in h's dtype."""
    gate, up = h.float().chunk(2, -1)
    if limit > 0:
        up = up.clamp(-limit, limit)
        gate = gate.clamp(max=limit)
    return (F.silu(gate) * up * route.unsqueeze(-1)).to(h.dtype)


def swiglu_grad(h: Tensor, route: Tensor, grad: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` in h and route."""
    gate, up = h.float().chunk(2, -1)
    grad = grad.float()
    gate_in, up_in = gate, up
    if limit > 0:
        up = up.clamp(-limit, limit)
        gate = gate.clamp(max=limit)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_route = (grad * silu * up).sum(-1)
    grad = grad * route.unsqueeze(-1)
    d_up = grad * silu
    d_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    if limit > 0:
        d_up = torch.where(up_in.abs() <= limit, d_up, 0.0)
        d_gate = torch.where(gate_in <= limit, d_gate, 0.0)
    return torch.cat((d_gate, d_up), -1).to(h.dtype), d_route


def joint_softmax(
    near: Tensor, far: Tensor | None, near_mask: Tensor, far_mask: Tensor | None, sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """One softmax over two score blocks and a sink.

    Args:
        near: `[.., H, a]`, far: `[.., H, b]`, raw scores.   masks broadcast to them, true = visible.
        sink: float32 `[H]`, broadcast over the leading axes.
    Returns: probabilities in the scores' dtype and the sink's, float32 `[.., H]`.
    """
    low = -1e30
    a = torch.where(near_mask, near.float() * scale, low)
    top = torch.maximum(a.amax(-1), sink)
    if far is None or far_mask is None:
        e = torch.exp(a - top.unsqueeze(-1))
        sunk = torch.exp(sink - top)
        inverse = 1.0 / (e.sum(-1) + sunk)
        return (e * inverse.unsqueeze(-1)).to(near.dtype), None, sunk * inverse
    b = torch.where(far_mask, far.float() * scale, low)
    top = torch.maximum(top, b.amax(-1))
    e, f = torch.exp(a - top.unsqueeze(-1)), torch.exp(b - top.unsqueeze(-1))
    sunk = torch.exp(sink - top)
    inverse = 1.0 / (e.sum(-1) + f.sum(-1) + sunk)
    return (
        (e * inverse.unsqueeze(-1)).to(near.dtype),
        (f * inverse.unsqueeze(-1)).to(far.dtype),
        sunk * inverse,
    )


def softmax_grad(p: Tensor, dp: Tensor, dot: Tensor, scale: float) -> Tensor:
    """`p * (dp - dot) * scale` in p's dtype; dot `[..]` is the row sum of output times gradient."""
    return (p.float() * (dp.float() - dot.unsqueeze(-1)) * scale).to(p.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row loss, float32 `[n]`, and its gradient in the logits, in their dtype."""
    wide = logits.float()
    log_total = torch.logsumexp(wide, -1, keepdim=True)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    hit = columns == targets.unsqueeze(-1)
    grad = torch.exp(wide - log_total) - hit.float()
    loss = log_total.squeeze(-1) - torch.where(hit, wide, 0.0).sum(-1)
    return loss, grad.to(logits.dtype)
