"""Reference operators in plain torch: the meaning of every kernel, differentiable, no packing tricks.

Called by the model through the `Operators` protocol; native kernels are tested against this file.
Index scoring and sparse attention live in their own files and are joined here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cedar.formats import codec
from cedar.formats.rows import RowFormat
from cedar.kernels import reference_attention, reference_index
from cedar.kernels.composed import ComposedOperators
from cedar.kernels.operators import (
    Expert,
    Mixes,
    PagedRows,
    Pool,
    Routing,
    Selection,
    Weight,
    WindowRows,
)


def decode_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The projection as a plain `[out, in]` tensor; exact in bfloat16 and float32."""
    if weight.scale is None:
        return weight.values.to(dtype)
    scale = weight.scale.view(torch.uint8)
    if weight.values.dtype == torch.int8:
        return codec.decode_fp4_weight(weight.values.view(torch.uint8), scale).to(dtype)
    return codec.decode_fp8_weight(weight.values.view(torch.uint8), scale).to(dtype)


class ReferenceOperators(ComposedOperators):
    """The operator set in plain torch. Stateless."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    def rotate(self, x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
        rope = 2 * cos_sin.shape[-2]
        broadcast = (cos_sin.shape[0],) + (1,) * (x.dim() - 2) + (rope // 2,)
        cos = cos_sin[..., 0].view(broadcast)
        sin = cos_sin[..., 1].view(broadcast)
        if inverse:
            sin = -sin
        head, tail = x[..., :-rope], x[..., -rope:].float()
        even, odd = tail[..., 0::2], tail[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return torch.cat((head, rotated.flatten(-2).to(x.dtype)), dim=-1)

    def linear(self, x: Tensor, weight: Weight, *, quantise_input: bool = True) -> Tensor:
        if weight.scale is not None and quantise_input:
            x = codec.dequantise_act(codec.quantise_act(x)).to(x.dtype)
        return F.linear(x, decode_weight(weight, x.dtype))

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        groups = x.shape[1]
        blocks = decode_weight(weight, x.dtype).unflatten(0, (groups, -1))
        return torch.einsum("ngi,gri->ngr", x, blocks).flatten(1)

    def hc_mixes(
        self, stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float,
        norm_eps: float,
    ) -> Mixes:  # fmt: skip
        copies = stream.shape[1]
        flat = stream.flatten(1).float()
        rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        mixes = F.linear(flat, fn) * rho
        return split_mixes(mixes, base, scale, copies=copies, iters=iters, eps=eps)

    def hc_collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * stream.float()).sum(1).to(stream.dtype)

    def hc_expand(self, y: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
        mixed = torch.einsum("nij,nid->njd", mixes.comb, stream.float())
        return (mixes.post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(stream.dtype)

    def pool_groups(self, kv: Tensor, gate: Tensor) -> Tensor:
        return (torch.softmax(gate, dim=1) * kv).sum(1)

    def pack_rows(self, x: Tensor, fmt: RowFormat) -> Tensor:
        return codec.encode_rows(x, fmt)

    def store_rows(self, x: Tensor, rows: Tensor, where: Tensor, fmt: RowFormat) -> None:
        rows[where] = codec.encode_rows(x, fmt)

    def load_rows(self, rows: Tensor, where: Tensor, fmt: RowFormat) -> Tensor:
        return codec.decode_rows(rows[where], fmt)

    def index_topk(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, *, topk: int, pool: Pool | None = None,
    ) -> Selection:  # fmt: skip
        return reference_index.index_topk(
            queries, head_weights, keys, sequences, visible, topk=topk, pool=pool
        )

    def index_pool(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, *, topk: int, num_blocks: int, block_size: int,
    ) -> tuple[Selection, Pool]:  # fmt: skip
        return reference_index.index_pool(
            queries, head_weights, keys, sequences, visible,
            topk=topk, num_blocks=num_blocks, block_size=block_size,
        )  # fmt: skip

    def sparse_attention(
        self, q: Tensor, window: WindowRows, selected: PagedRows | None,
        selection: Selection | None, sequences: Tensor, sink: Tensor, *, scale: float,
        q_selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return reference_attention.sparse_attention(
            q, window, selected, selection, sequences, sink, scale=scale, q_selected=q_selected
        )

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, *, topk: int, scoring: str, normalise: bool,
        scale: float,
    ) -> Routing:  # fmt: skip
        logits = F.linear(x.float(), gate.float())
        scores = router_scores(logits, scoring)
        biased = scores + bias
        # A stable descending sort breaks ties toward the lowest expert id.
        experts = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, :topk]
        weights = scores.gather(-1, experts)
        if normalise and topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * scale)

    def moe(
        self,
        x: Tensor,
        routing: Routing,
        experts: Sequence[Expert],
        shared: Expert,
        *,
        limit: float,
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert_id, expert in enumerate(experts):
            rows, slot = torch.where(routing.experts == expert_id)
            if rows.numel():
                route_weight = routing.weights[rows, slot].unsqueeze(-1)
                out = self._expert(x[rows], expert, limit, route_weight)
                total = total.index_add(0, rows, out.float())
        total = total + self._expert(x, shared, limit, None).float()
        return total.to(x.dtype)

    def _expert(
        self, x: Tensor, expert: Expert, limit: float, route_weight: Tensor | None
    ) -> Tensor:
        gate = self.linear(x, expert.w1).float()
        up = self.linear(x, expert.w3).float()
        if limit > 0:
            up = up.clamp(-limit, limit)
            gate = gate.clamp(max=limit)
        hidden = F.silu(gate) * up
        if route_weight is not None:
            hidden = hidden * route_weight
        return self.linear(hidden.to(x.dtype), expert.w2)


def router_scores(logits: Tensor, scoring: str) -> Tensor:
    """Router score of float32 logits; softplus is the identity above 20 (specification 4.10)."""
    if scoring == "sqrtsoftplus":
        return F.softplus(logits, threshold=20.0).sqrt()
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    raise ValueError(f"scoring={scoring!r}: allowed are sqrtsoftplus, sigmoid, softmax")


def split_mixes(
    mixes: Tensor, base: Tensor, scale: Tensor, *, copies: int, iters: int, eps: float
) -> Mixes:
    """Raw mixes `[N, C * (C + 2)]` to coefficients; the Sinkhorn order of specification 4.2."""
    pre, post, comb = mixes.split((copies, copies, copies * copies), dim=-1)
    base_pre, base_post, base_comb = base.split((copies, copies, copies * copies))
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    comb = (comb * scale[2] + base_comb).unflatten(-1, (copies, copies))
    comb = torch.softmax(comb, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return Mixes(pre, post, comb)
