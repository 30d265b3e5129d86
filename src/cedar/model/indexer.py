"""Indexer of a full or reindex layer: which compressed rows a query reads. Called by `attention.py`.

Full layers also own the index-key projection. Formulas: specification 4.7.
"""

from __future__ import annotations

from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import Operators
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

    def queries(self, a: Tensor, cos_sin: Tensor) -> Tensor:
        """`[n, q_lora_rank] -> [n, P, p]`, rotated."""
        out = self._ops.project(a, self.wq_b.packed, cos_sin=cos_sin, vectors=self._heads)
        return out.view(-1, self._heads, self._width)

    def head_weights(self, u: Tensor) -> Tensor:
        """`[n, D] -> [n, P]`, scaled by width^-0.5 * heads^-0.5 in u's dtype."""
        return self.weights_proj(u) * (self._width**-0.5 * self._heads**-0.5)

    def keys(self, latents: Tensor) -> Tensor:
        """Raw latents `[G, d]` to normed keys `[G, p]`, not yet rotated."""
        return self.k_norm(self.wk(latents))
