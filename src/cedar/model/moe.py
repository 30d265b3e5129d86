"""Mixture of experts: router, routed experts and the shared expert. Called by `block.py`, which hands
its weights to a longer chain, and by training, which calls it.

Module names follow the released checkpoint: `gate`, `experts.{e}`, `shared_experts`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model_config import ModelConfig
from cedar.config.types import WeightDtype
from cedar.kernels.operators import Expert, ExpertBank, Operators, Router
from cedar.model.gathered import Gathered
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
        first = self.experts[0]
        self._bank = Gathered((first.get_submodule("w1"),), self._gather_bank)

    def weight_modules(self) -> tuple[nn.Module, ...]:
        """Modules that hold the weights; one stands for all routed experts."""
        shared, first = self.shared_experts, self.experts[0].get_submodule("w1")
        return self.gate, shared.w1, shared.w3, shared.w2, first

    def routed(self) -> ExpertBank:
        """The routed experts as the operators take them."""
        return self._bank.get()

    def _gather_bank(self) -> ExpertBank:
        return ExpertBank(e.packed for e in self.experts if isinstance(e, SwiGLU))

    def router(self) -> Router:
        """How rows choose experts."""
        config = self._config
        return Router(
            self.gate.weight, self.gate.bias, config.num_experts_per_tok, config.scoring_func,
            config.norm_topk_prob, config.routed_scaling_factor,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """`[N, D] -> [N, D]`."""
        router = self.router()
        routing = self._ops.route(
            x, router.gate, router.bias, topk=router.topk, scoring=router.scoring,
            normalise=router.normalise, scale=router.scale,
        )  # fmt: skip
        shared, limit = self.shared_experts.packed, self._config.swiglu_limit
        return self._ops.moe(x, routing, self.routed(), shared, limit=limit)
