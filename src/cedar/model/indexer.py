"""Indexer of a full or reindex layer: which compressed rows a query reads. Called by `attention.py`.

Full layers also own the index-key projection. Formulas: specification 4.7.
"""

from __future__ import annotations

from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import IndexWeights, Operators
from cedar.model.gathered import Gathered
from cedar.model.layers import Linear, RMSNorm


class Indexer(nn.Module):
    """Index queries, head weights and, in an owner, index keys."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, ops: Operators) -> None:
        super().__init__()
        self._ops = ops
        self._heads, self._width = config.index_n_heads, config.index_head_dim
        out = self._heads * self._width
        self.wq_b = Linear(out, config.q_lora_rank, config.dense_dtype, ops)
        self.weights_proj = Linear(self._heads, config.hidden_size, "bf16", ops)
        if spec.role == "full":
            self.wk = Linear(self._width, config.head_dim, "bf16", ops)
            self.k_norm = RMSNorm(self._width, config.rms_norm_eps, ops)
        self._scale = self._width**-0.5 * self._heads**-0.5
        self._weights = Gathered(self.weight_modules(), self._gather)

    def weight_modules(self) -> tuple[nn.Module, ...]:
        """Modules that hold what a search needs."""
        return self.wq_b, self.weights_proj

    @property
    def weights(self) -> IndexWeights:
        """What a search needs, for the chain that does all of it."""
        return self._weights.get()

    def _gather(self) -> IndexWeights:
        return IndexWeights(
            wq_b=self.wq_b.packed, head_weights=self.weights_proj.packed, scale=self._scale
        )

    def queries(self, a: Tensor, cos_sin: Tensor) -> Tensor:
        """`[n, q_lora_rank] -> [n, P, p]`, rotated."""
        out = self._ops.project(a, self.wq_b.packed, cos_sin=cos_sin, vectors=self._heads)
        return out.view(-1, self._heads, self._width)

    def head_weights(self, u: Tensor) -> Tensor:
        """`[n, D] -> [n, P]`, scaled by width^-0.5 * heads^-0.5 in u's dtype."""
        return self.weights_proj(u) * self._scale

    def keys(self, latents: Tensor) -> Tensor:
        """Raw latents `[G, d]` to normed keys `[G, p]`, not yet rotated."""
        return self.k_norm(self.wk(latents))
