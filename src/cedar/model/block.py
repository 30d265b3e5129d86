"""One layer: Engram, attention, MoE, and the single-pass hyper-connections around them.

Called by `causal_lm.py`. Formulas: specification 4.2, 4.3. The `pre` coefficients that a sublayer
predicts are used by the NEXT sublayer; `post` and `comb` by the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import HyperWeights, Operators
from cedar.model.attention import Attention
from cedar.model.engram import Engram
from cedar.model.kv import Rows
from cedar.model.layers import RMSNorm
from cedar.model.moe import MoE
from cedar.model.rotary import RotaryTables
from cedar.model.spans import Spans


class Block(nn.Module):
    """One layer of the backbone."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, ops: Operators) -> None:
        super().__init__()
        self.spec, self._ops, self._config = spec, ops, config
        copies, width = config.hc_mult, config.hidden_size
        mixes = copies * (copies + 2)
        self.engram = Engram(config, spec, ops) if spec.has_engram else None
        self.attn_norm = RMSNorm(width, config.rms_norm_eps, ops)
        self.attn = Attention(config, spec, ops)
        self.ffn_norm = RMSNorm(width, config.rms_norm_eps, ops)
        self.ffn = MoE(config, ops)
        self.hc_attn_fn = nn.Parameter(torch.empty(mixes, copies * width))
        self.hc_attn_base = nn.Parameter(torch.zeros(mixes))
        self.hc_attn_scale = nn.Parameter(torch.ones(3))
        self.hc_ffn_fn = nn.Parameter(torch.empty(mixes, copies * width))
        self.hc_ffn_base = nn.Parameter(torch.zeros(mixes))
        self.hc_ffn_scale = nn.Parameter(torch.ones(3))

    def attention_input(self, stream: Tensor, pre: Tensor) -> Tensor:
        """`attn_norm(collapse(stream, pre))`: `[N, C, D]`, `[N, C]` -> `[N, D]`.

        Also what a decoder full layer projects its rows from, applied to the encoder boundary.
        """
        return self._ops.collapse_norm(
            stream, pre, self.attn_norm.weight, self._config.rms_norm_eps
        )

    def forward(
        self, stream: Tensor, pre: Tensor, spans: Spans, queries: Spans, rows: Rows,
        tables: RotaryTables,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the layer; the Engram term has already been added to the stream.

        Args:
            stream: `[N, C, D]` and pre: `[N, C]` of the rows of `spans`.
            queries: rows whose output is wanted, a suffix of each span; the others only leave
                their window row (and compressed row) behind.
        Returns: stream `[n, C, D]` and next pre `[n, C]` of the rows of `queries`.
        """
        ops = self._ops
        y = self.attn(self.attention_input(stream, pre), spans, queries, rows, tables)
        keep = spans.rows_of(queries)
        if keep is not None:
            stream = stream[keep]
        half = self._hyper(self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        mixes = ops.hc_mixes(
            stream, half.fn, half.base, half.scale, iters=half.iters, eps=half.eps,
            norm_eps=half.norm_eps,
        )  # fmt: skip
        following = self._hyper(self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        stream, ffn, v = ops.hc_turn(y, stream, mixes, following, self.ffn_norm.weight)
        return ops.hc_expand(self.ffn(v), stream, ffn), ffn.pre

    def _hyper(self, fn: Tensor, base: Tensor, scale: Tensor) -> HyperWeights:
        config = self._config
        return HyperWeights(
            fn, base, scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        )
