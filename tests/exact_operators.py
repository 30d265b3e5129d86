"""Reference operators whose sums are formed in float64 and rounded to float32 once.

A float32 matrix product gives other last bits when it has more rows, and a vectorised `exp` other
ones at the end of an array. One such bit can flip an FP4 code, and then two runs that should be
equal are not comparable to better than that code. Summed in float64, the results that must agree
(one chunk or many, one sequence or a batch, cached or not) agree to the last bit, whatever the
machine, and tests can ask for equality. Nothing else differs from the reference operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.engine.forward import EngramRows
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.random_weights import random_tensors
from cedar.formats import codec
from cedar.kernels.operators import (
    Expert,
    Mixes,
    PagedRows,
    Routing,
    Selection,
    Weight,
    WindowRows,
)
from cedar.kernels.reference import (
    ReferenceOperators,
    decode_weight,
    router_scores,
    split_mixes,
)
from cedar.loading import assign, build_net
from cedar.model.dense_rows import DenseRows
from cedar.model.rotary import Rotary


class ExactOperators(ReferenceOperators):
    """The reference operators with float64 sums; float32 activations only."""

    name = "exact"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.double()).to(x.dtype)

    def rotate(self, x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
        rope = 2 * cos_sin.shape[-2]
        turn = torch.view_as_complex(cos_sin.double().contiguous())
        turn = turn.view(turn.shape[0], *(1,) * (x.dim() - 2), rope // 2)
        pairs = torch.view_as_complex(x[..., -rope:].double().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * (turn.conj() if inverse else turn))
        return torch.cat((x[..., :-rope], turned.flatten(-2).to(x.dtype)), dim=-1)

    def linear(self, x: Tensor, weight: Weight, *, quantise_input: bool = True) -> Tensor:
        if weight.scale is not None and quantise_input:
            x = codec.dequantise_act(codec.quantise_act(x)).to(x.dtype)
        return F.linear(x.double(), decode_weight(weight, torch.float64)).to(x.dtype)

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        blocks = decode_weight(weight, torch.float64).unflatten(0, (x.shape[1], -1))
        return torch.einsum("ngi,gri->ngr", x.double(), blocks).flatten(1).to(x.dtype)

    def hc_mixes(
        self, stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float,
        norm_eps: float,
    ) -> Mixes:  # fmt: skip
        flat = stream.flatten(1).double()
        rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        raw = F.linear(flat, fn.double()) * rho
        wide = split_mixes(
            raw, base.double(), scale.double(), copies=stream.shape[1], iters=iters, eps=eps
        )
        return Mixes(*(part.float() for part in wide))

    def hc_collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        return (pre.double().unsqueeze(-1) * stream.double()).sum(1).to(stream.dtype)

    def hc_expand(self, y: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
        mixed = torch.einsum("nij,nid->njd", mixes.comb.double(), stream.double())
        return (mixes.post.double().unsqueeze(-1) * y.double().unsqueeze(1) + mixed).to(
            stream.dtype
        )

    def pool_groups(self, kv: Tensor, gate: Tensor) -> Tensor:
        return super().pool_groups(kv.double(), gate.double()).to(kv.dtype)

    def sparse_attention(
        self, q: Tensor, window: WindowRows, selected: PagedRows | None,
        selection: Selection | None, sequences: Tensor, sink: Tensor, *, scale: float,
        q_selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        values, mask = _window_entries(window)
        split = mask.shape[1]
        if selected is not None and selection is not None:
            far, far_mask = _selected_entries(selected, selection, sequences)
            values, mask = torch.cat((values, far), 1), torch.cat((mask, far_mask), 1)
        return softmax_attention(q, values, mask, sink, scale=scale, split=split, other=q_selected)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, *, topk: int, scoring: str, normalise: bool,
        scale: float,
    ) -> Routing:  # fmt: skip
        scores = router_scores(F.linear(x.double(), gate.double()), scoring)
        experts = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :topk]
        weights = scores.gather(-1, experts)
        if normalise and topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, (weights * scale).float())

    def _expert(
        self, x: Tensor, expert: Expert, limit: float, route_weight: Tensor | None
    ) -> Tensor:
        gate = self.linear(x, expert.w1).double()
        up = self.linear(x, expert.w3).double()
        if limit > 0:
            up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        hidden = F.silu(gate) * up
        if route_weight is not None:
            hidden = hidden * route_weight
        return self.linear(hidden.to(x.dtype), expert.w2)


def softmax_attention(
    q: Tensor, values: Tensor, mask: Tensor, sink: Tensor, *, scale: float, split: int,
    other: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention with keys = values and a sink, in float64.

    Args:
        q: `[N, H, d]`.   values: `[N, E, d]`.   mask: bool `[N, E]`.
        split, other: the entries from `split` on are scored with other queries, and their part of
            the output comes back apart.
    """
    q, values = q.double(), values.double()
    scores = torch.einsum("nhd,ned->nhe", q, values)
    if other is not None:
        tail = torch.einsum("nhd,ned->nhe", other.double(), values[:, split:])
        scores = torch.cat((scores[..., :split], tail), -1)
    weights = torch.exp(scores * scale) * mask.unsqueeze(1)
    weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sink.double()).view(1, -1, 1))
    if other is None:
        return torch.einsum("nhe,ned->nhd", weights, values).float(), None
    near = torch.einsum("nhe,ned->nhd", weights[..., :split], values[:, :split])
    far = torch.einsum("nhe,ned->nhd", weights[..., split:], values[:, split:])
    return near.float(), far.float()


def _window_entries(window: WindowRows) -> tuple[Tensor, Tensor]:
    """Values `[N, E, d]` and mask `[N, E]` of the window rows each query sees."""
    lo, hi = window.lo.long().unsqueeze(1), window.hi.long().unsqueeze(1)
    positions = lo + torch.arange(int((hi - lo).max().clamp(min=0)) + 1)
    mask = positions <= hi
    numbers = window.base.unsqueeze(1) + positions % window.modulus
    return _decoded(window.rows, numbers, mask, window), mask


def _selected_entries(
    paged: PagedRows, selection: Selection, sequences: Tensor
) -> tuple[Tensor, Tensor]:
    mask = selection.positions >= 0
    positions = selection.positions.long().clamp(min=0)
    per_block = paged.rows_per_block
    tables = paged.tables.long()[sequences.long()]
    numbers = tables.gather(1, positions // per_block) * per_block + positions % per_block
    return _decoded(paged.rows, numbers, mask, paged), mask


def _decoded(rows: Tensor, numbers: Tensor, mask: Tensor, source: PagedRows | WindowRows) -> Tensor:
    """Rows as values; unused entries are zero and their rows are not read."""
    values = torch.zeros(*numbers.shape, source.fmt.width)
    values[mask] = codec.decode_rows(rows[numbers[mask]], source.fmt)
    return values


class ExactRotary(Rotary):
    """Rotary tables with the cosines of the float32 angles rounded once."""

    def cos_sin(self, spec: LayerSpec, positions: Tensor) -> Tensor:
        frequencies = self.plain if spec.role == "window" else self.yarn
        angles = (positions.float().unsqueeze(1) * frequencies).double()
        return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


class ExactDenseRows(DenseRows):
    """Uncached rows with attention in float64."""

    def dense_attention(
        self, q: Tensor, values: Tensor, mask: Tensor, sink: Tensor, *, split: int,
        other: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        every = values.unsqueeze(1).expand(-1, q.shape[1], -1, -1).flatten(0, 1)
        near, far = softmax_attention(
            q.flatten(0, 1), every, mask.flatten(0, 1), sink, scale=self._scale, split=split,
            other=None if other is None else other.flatten(0, 1),
        )  # fmt: skip
        shape = q.shape[:2]
        return near.unflatten(0, shape), None if far is None else far.unflatten(0, shape)


class ExactModel(LoadedModel):
    """A loaded model whose uncached path is exact too."""

    def dense_rows(self, batch: int, length: int) -> DenseRows:
        scale = self.config.head_dim**-0.5
        return ExactDenseRows(self.plan, batch=batch, length=length, scale=scale)


def exact_model(
    config: ModelConfig, *, index_key_rule: str = "corrected", seed: int = 0
) -> ExactModel:
    """A model with random weights and exact sums."""
    return with_weights(config, random_tensors(config, seed), index_key_rule=index_key_rule)


def with_weights(
    config: ModelConfig, tensors: dict[str, Tensor], *, index_key_rule: str = "corrected",
    engram: EngramRows | None = None,
) -> ExactModel:  # fmt: skip
    """A model with given weights and exact sums."""
    net = build_net(config, ExactOperators(), torch.float32)
    assign(net, tensors)
    net.rotary = ExactRotary(config)
    return ExactModel(net, engram=engram, index_key_rule=index_key_rule)
