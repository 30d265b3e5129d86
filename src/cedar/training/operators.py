"""`TrainingOperators`: the operators a training step uses, fast and differentiable.

The rest of the operator set (packed rows, index search over pools) belongs to inference and is
inherited from the reference. Weights are float32 masters; they are rounded to the activation dtype
where they are used, or to the released packed format first when `quantiser` is set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cedar.kernels.operators import Expert, Routing, Weight
from cedar.kernels.reference import ReferenceOperators
from cedar.training.grouped_experts import grouped_experts
from cedar.training.kernels import Kernels


class TrainingOperators(ReferenceOperators):
    """See the module docstring.

    Attributes:
        prepared: id of a master weight -> its packed-format value, from `quantiser.py`; products
            with such a weight also round their input, as inference does.
        counts: rows per expert of every `route` call since it was cleared, for router balance.
    """

    name = "training"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.prepared: dict[int, Tensor] = {}
        self.counts: list[Tensor] = []

    def weight(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A master weight as the products use it."""
        ready = self.prepared.get(id(values))
        return values.to(dtype) if ready is None else ready

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
        broadcast = (cos_sin.shape[0],) + (1,) * (x.dim() - 2) + (cos_sin.shape[1],)
        cos, sin = cos_sin[..., 0].reshape(broadcast), cos_sin[..., 1].reshape(broadcast)
        return self._kernels.rotate(x, cos, -sin if inverse else sin)

    def linear(self, x: Tensor, weight: Weight, *, quantise_input: bool = True) -> Tensor:
        if quantise_input and id(weight.values) in self.prepared:
            x = self._kernels.through_act(x)
        return F.linear(x, self.weight(weight.values, x.dtype))

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        groups = x.shape[1]
        blocks = self.weight(weight.values, x.dtype).unflatten(0, (groups, -1))
        parts = [F.linear(x[:, g], blocks[g]) for g in range(groups)]
        return torch.cat(parts, -1)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, *, topk: int, scoring: str, normalise: bool,
        scale: float,
    ) -> Routing:  # fmt: skip
        routing = super().route(
            x, gate, bias, topk=topk, scoring=scoring, normalise=normalise, scale=scale
        )
        self.counts.append(torch.bincount(routing.experts.flatten(), minlength=gate.shape[0]))
        return routing

    def moe(
        self,
        x: Tensor,
        routing: Routing,
        experts: Sequence[Expert],
        shared: Expert,
        *,
        limit: float,
    ) -> Tensor:
        def stacked(one: Expert) -> Tensor:
            return torch.cat(
                (self.weight(one.w1.values, x.dtype), self.weight(one.w3.values, x.dtype))
            )

        packed = id(experts[0].w1.values) in self.prepared
        if packed:
            x = self._kernels.through_act(x)
        up = torch.stack([stacked(expert) for expert in experts])
        down = torch.stack([self.weight(expert.w2.values, x.dtype) for expert in experts])
        routed = grouped_experts(
            x, routing.weights, routing.experts, up, down, limit, packed, self._kernels
        )
        h = F.linear(x, stacked(shared))
        hidden = self._kernels.swiglu(h, x.new_ones(x.shape[0], dtype=torch.float32), limit)
        if packed:
            hidden = self._kernels.through_act(hidden)
        return routed + F.linear(hidden, self.weight(shared.w2.values, x.dtype))
