"""One attention for all roles; what it does is read off its `LayerSpec`. Called by `block.py`.

Window, sinks, grouped output and the optional adapter of borrowed rows: specification 4.5, 4.9, 11.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import AttentionWeights, Operators
from cedar.model.compressor import Compressor, append_rows
from cedar.model.gathered import Gathered
from cedar.model.indexer import Indexer
from cedar.model.kv import Rows
from cedar.model.layers import Linear, RMSNorm
from cedar.model.rotary import RotaryTables
from cedar.model.spans import Spans


class KVAdapter(nn.Module):
    """Linear map A of borrowed rows, v -> A v, folded into queries and outputs.

    `<q, A v> = <A^T q, v>` and `sum p A v = A sum p v`, so the stored rows stay shared and packed.
    diag: A = diag(scale). lowrank: A = I + up @ down.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        width, rank = config.head_dim, config.kv_adapter_rank
        self._diag = spec.kv_adapter == "diag"
        if self._diag:
            self.scale = nn.Parameter(torch.ones(width))
        else:
            self.down = nn.Parameter(torch.zeros(rank, width))
            self.up = nn.Parameter(torch.zeros(width, rank))

    def to_queries(self, q: Tensor) -> Tensor:
        """`A^T q` for `[n, H, d]`."""
        if self._diag:
            return (q.float() * self.scale).to(q.dtype)
        return (q.float() + q.float() @ self.up @ self.down).to(q.dtype)

    def to_outputs(self, o: Tensor) -> Tensor:
        """`A o` for `[n, H, d]`."""
        if self._diag:
            return (o.float() * self.scale).to(o.dtype)
        return (o.float() + o.float() @ self.down.t() @ self.up.t()).to(o.dtype)


class Attention(nn.Module):
    """Attention of one layer over its window and, unless window-only, its selected rows."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, ops: Operators) -> None:
        super().__init__()
        self._ops, self._spec = ops, spec
        self._heads, self._groups = config.num_attention_heads, config.o_groups
        heads, width, dense = config.num_attention_heads, config.head_dim, config.dense_dtype
        rank, eps = config.q_lora_rank, config.rms_norm_eps
        self._eps = eps
        self.wq_a = Linear(rank, config.hidden_size, dense, ops)
        self.q_norm = RMSNorm(rank, eps, ops)
        self.wq_b = Linear(heads * width, rank, dense, ops)
        self.wkv = Linear(width, config.hidden_size, dense, ops)
        self.kv_norm = RMSNorm(width, eps, ops)
        inner = config.o_groups * config.o_lora_rank
        self.wo_a = Linear(inner, heads // config.o_groups * width, dense, ops)
        self.wo_b = Linear(config.hidden_size, inner, dense, ops)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if spec.role == "full":
            self.compressor = Compressor(config, spec, ops)
        if spec.role in ("full", "reindex"):
            self.indexer = Indexer(config, spec, ops)
        self.kv_adapter = KVAdapter(config, spec) if spec.kv_adapter != "none" else None
        self._weights = Gathered(self.weight_modules(), self._gather)

    def _gather(self) -> AttentionWeights:
        return AttentionWeights(
            wkv=self.wkv.packed, kv_norm=self.kv_norm.weight,
            wq_a=self.wq_a.packed, q_norm=self.q_norm.weight, wq_b=self.wq_b.packed,
            wo_a=self.wo_a.packed, wo_b=self.wo_b.packed, sink=self.attn_sink,
            eps=self._eps, heads=self._heads, groups=self._groups,
        )  # fmt: skip

    def append(self, u: Tensor, spans: Spans, rows: Rows, tables: RotaryTables) -> None:
        """Store the compressed rows and index keys of `u [N, D]`; full layers only."""
        append_rows(
            u, spans, rows, tables, spec=self._spec, compressor=self.compressor,
            index_key=self.indexer.keys, ops=self._ops,
        )  # fmt: skip

    def forward(
        self, u: Tensor, spans: Spans, queries: Spans, rows: Rows, tables: RotaryTables
    ) -> Tensor:
        """Add the window rows of `spans`, attend with the rows of `queries` (a suffix of spans).

        Args:
            u: `[N, D]`, normed input of the rows of `spans`.
        Returns: `[n, D]` for the rows of `queries`.
        """
        spec = self._spec
        if spec.role == "full" and spec.kv_input == "self":
            self.append(u, spans, rows, tables)
        return self.attend(u, spans, queries, rows, tables)

    def attend(
        self, u: Tensor, spans: Spans, queries: Spans, rows: Rows, tables: RotaryTables
    ) -> Tensor:
        """As `forward`, of a layer whose own compressed rows are stored already."""
        spec, ops, weights = self._spec, self._ops, self.weights
        keep, cos_sin = spans.rows_of(queries), tables.rows(spec, spans)
        if keep is None:
            window, latent, q = ops.project_attention(u, weights, cos_sin)
        else:
            window = ops.project_window(u, weights, cos_sin)
            u, cos_sin = u[keep], tables.rows(spec, queries)
            latent, q = ops.project_queries(u, weights, cos_sin)
        if spec.role in ("full", "reindex"):
            self._select(u, latent, queries, rows, cos_sin)
        ring = None if self.kv_adapter is not None else rows.in_ring(spec, spans, queries)
        if ring is not None:
            return ops.attend_ring(window, q, ring, weights, cos_sin)
        q_selected = None if self.kv_adapter is None else self.kv_adapter.to_queries(q)
        o, selected = rows.attend(spec, spans, window, queries, q, weights.sink, q_selected)
        if self.kv_adapter is not None and selected is not None:
            o = o + self.kv_adapter.to_outputs(selected)
        return ops.project_output(o, cos_sin, weights.wo_a, weights.wo_b, groups=self._groups)

    @property
    def weights(self) -> AttentionWeights:
        """The projections, for a chain of the whole layer."""
        return self._weights.get()

    def weight_modules(self) -> tuple[nn.Module, ...]:
        """Modules that hold the projections."""
        return (
            self, self.wkv, self.kv_norm, self.wq_a, self.q_norm, self.wq_b, self.wo_a, self.wo_b,
        )  # fmt: skip

    def _select(
        self, u: Tensor, latent: Tensor, queries: Spans, rows: Rows, cos_sin: Tensor
    ) -> None:
        """Publish what an index source selects for the rows of `queries`."""
        spec, indexer = self._spec, self.indexer
        search = rows.key_search(spec, queries)
        if search is not None:
            found = self._ops.select_rows(latent, u, indexer.weights, cos_sin, search)
            rows.publish(spec, queries, found)
            return
        # Detached: in training the index branch learns from its own loss alone.
        index_q = indexer.queries(latent.detach(), cos_sin)
        rows.select(spec, queries, index_q, indexer.head_weights(u.detach()))
