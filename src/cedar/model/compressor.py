"""Compressor of a full layer: hidden rows -> one compressed row and one index key per group.

Called by `attention.py` on the layer's own input, or by `causal_lm.project_kv` on the encoder
boundary. Formulas: specification 4.6.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import Operators
from cedar.model.kv import Groups, Rows
from cedar.model.layers import Linear, RMSNorm
from cedar.model.rotary import RotaryTables
from cedar.model.spans import Spans


class Compressor(nn.Module):
    """Projects and pools `ratio` tokens into one latent.

    At ratio 1 it is a plain projection; above, a per-channel softmax over the group's gates pools
    in float32 and the result is rounded before the norm.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, ops: Operators) -> None:
        super().__init__()
        self._ops, self._ratio = ops, spec.compress_ratio
        self.wkv = Linear(config.head_dim, config.hidden_size, "bf16", ops)
        self.wgate = (
            Linear(config.head_dim, config.hidden_size, "bf16", ops) if self._ratio > 1 else None
        )
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops)

    def project(self, u: Tensor) -> tuple[Tensor, Tensor | None]:
        """kv and gate of each row; float32 above ratio 1, u's dtype and no gate at ratio 1."""
        if self.wgate is None:
            return self.wkv(u), None
        return self._ops.project_groups(u, self.wkv.packed, self.wgate.packed)

    def latents(self, groups: Groups, like: Tensor) -> Tensor:
        """Normed latents `[G, d]` of complete groups, in the dtype of `like`, not yet rotated."""
        if groups.gate is None:
            return self.norm(groups.kv.squeeze(1))
        return self.norm(self._ops.pool_groups(groups.kv, groups.gate).to(like.dtype))


def append_rows(
    u: Tensor, spans: Spans, rows: Rows, tables: RotaryTables, *, spec: LayerSpec,
    compressor: Compressor, index_key: Callable[[Tensor], Tensor], ops: Operators,
) -> None:  # fmt: skip
    """Compress the rows of `spans` and store what closed: main row and index key.

    The index key comes from the raw latent, before rotation and quantisation.

    Args:
        u: `[N, D]`, the normed attention input of this layer (or of the boundary).
        index_key: maps latents `[G, d]` to normed keys `[G, p]`.
    """
    kv, gate = compressor.project(u)
    groups = rows.complete_groups(spec, spans, kv, gate)
    if groups is None:
        return
    latents = compressor.latents(groups, u)
    cos_sin = tables.at(spec, groups.positions)
    # Detached: in training the index branch learns from its own loss alone.
    keys = ops.rotate(index_key(latents.detach()), cos_sin)
    rows.store(spec, groups, ops.rotate(latents, cos_sin), keys)
