"""Mixture of experts: router, routed experts and the shared expert. Called by `block.py`.

Module names follow the released checkpoint: `gate`, `experts.{e}`, `shared_experts`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model_config import ModelConfig
from cedar.config.types import WeightDtype
from cedar.kernels.operators import Expert, ExpertBank, Operators, Routing
from cedar.model.layers import Linear


class Gate(nn.Module):
    """Router weights: one row and one selection bias per expert."""

    def __init__(self, num_experts: int, width: int, has_image_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)
        self.bias_vl = (
            nn.Parameter(torch.zeros(num_experts), requires_grad=False) if has_image_bias else None
        )


class SwiGLU(nn.Module):
    """The projections of one expert."""

    def __init__(self, width: int, inner: int, dtype: WeightDtype, ops: Operators) -> None:
        super().__init__()
        self.w1 = Linear(inner, width, dtype, ops)
        self.w3 = Linear(inner, width, dtype, ops)
        self.w2 = Linear(width, inner, dtype, ops)

    @property
    def packed(self) -> Expert:
        """The expert as the operators take it."""
        return Expert(self.w1.packed, self.w3.packed, self.w2.packed)


class MoE(nn.Module):
    """Top-k routed SwiGLU experts plus one shared expert."""

    def __init__(self, config: ModelConfig, ops: Operators) -> None:
        super().__init__()
        self._ops, self._config = ops, config
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config.n_routed_experts, width, config.vision is not None)
        self.experts = nn.ModuleList(
            SwiGLU(width, inner, config.expert_dtype, ops) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = SwiGLU(width, inner, config.dense_dtype, ops)
        self._bank: ExpertBank | None = None

    def _routed(self) -> ExpertBank:
        """The routed experts as the operators take them; looked up again only if weights were replaced."""
        first = self.experts[0]
        assert isinstance(first, SwiGLU)
        if self._bank is None or self._bank[0].w1.values is not first.w1.weight:
            packed = (e.packed for e in self.experts if isinstance(e, SwiGLU))
            self._bank = ExpertBank(packed)
        return self._bank

    def route(self, x: Tensor) -> Routing:
        """Experts and weights of each row of `x [N, D]`."""
        config = self._config
        return self._ops.route(
            x,
            self.gate.weight,
            self.gate.bias,
            topk=config.num_experts_per_tok,
            scoring=config.scoring_func,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def forward(self, x: Tensor) -> Tensor:
        shared, limit = self.shared_experts.packed, self._config.swiglu_limit
        return self._ops.moe(x, self.route(x), self._routed(), shared, limit=limit)
