"""One layer: Engram, attention, MoE, and the single-pass hyper-connections around them.

Called by `causal_lm.py`. Formulas: specification 4.2, 4.3. The `pre` coefficients that a sublayer
predicts are used by the NEXT sublayer; `post` and `comb` by the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import (
    FeedForwardWeights,
    HyperWeights,
    LayerWeights,
    Operators,
    RingRows,
)
from cedar.model.attention import Attention
from cedar.model.engram import Engram
from cedar.model.gathered import Gathered
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
        self._is_index_source = spec.role in ("full", "reindex")
        index = self.attn.indexer.weight_modules() if self._is_index_source else ()
        self._weights = Gathered(
            (self, self.attn_norm, *self.attn.weight_modules(), *index, self.ffn_norm,
             *self.ffn.weight_modules()),
            self._gather,
        )  # fmt: skip

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
        ring = None
        if self.attn.kv_adapter is None:
            ring = rows.in_ring(self.spec, spans, queries)
        if ring is not None:
            return self._step(stream, pre, spans, ring, rows, tables)
        y = self.attn(self.attention_input(stream, pre), spans, queries, rows, tables)
        keep = spans.rows_of(queries)
        if keep is not None:
            stream = stream[keep]
        return self._ops.feed_forward(y, stream, self._weights.get().feed_forward)

    def _step(
        self, stream: Tensor, pre: Tensor, spans: Spans, ring: RingRows, rows: Rows,
        tables: RotaryTables,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`forward` of one token per sequence: one operator, after what its compressor stores."""
        spec, weights, search = self.spec, self._weights.get(), None
        if spec.role == "full" and spec.kv_input == "self":
            self.attn.append(self.attention_input(stream, pre), spans, rows, tables)
        if self._is_index_source:
            search = rows.key_search(spec, spans)
            if search is None:
                u = self.attention_input(stream, pre)
                y = self.attn.attend(u, spans, spans, rows, tables)
                return self._ops.feed_forward(y, stream, weights.feed_forward)
        cos_sin = tables.rows(spec, spans)
        stream, pre, found = self._ops.layer_step(stream, pre, weights, cos_sin, ring, search)
        if found is not None:
            rows.publish(spec, spans, found)
        return stream, pre

    def _gather(self) -> LayerWeights:
        second_half = FeedForwardWeights(
            attention=self._hyper(self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale),
            ffn=self._hyper(self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale),
            norm=self.ffn_norm.weight,
            router=self.ffn.router(),
            experts=self.ffn.routed(),
            shared=self.ffn.shared_experts.packed,
            limit=self._config.swiglu_limit,
        )
        return LayerWeights(
            norm=self.attn_norm.weight,
            eps=self._config.rms_norm_eps,
            attention=self.attn.weights,
            index=self.attn.indexer.weights if self._is_index_source else None,
            feed_forward=second_half,
        )

    def _hyper(self, fn: Tensor, base: Tensor, scale: Tensor) -> HyperWeights:
        config = self._config
        return HyperWeights(
            fn, base, scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        )
