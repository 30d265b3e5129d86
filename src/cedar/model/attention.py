"""One attention for all roles; what it does is read off its `LayerSpec`. Called by `block.py`.

Window, sinks, grouped output and the optional adapter of borrowed rows: specification 4.5, 4.9, 11.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import Operators
from cedar.model.compressor import Compressor, append_rows
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
        spec, ops = self._spec, self._ops
        window = ops.project(
            u, self.wkv.packed, norm=self.kv_norm.weight, eps=self._eps,
            cos_sin=tables.rows(spec, spans),
        )  # fmt: skip
        if spec.role == "full" and spec.kv_input == "self":
            self.append(u, spans, rows, tables)
        keep = spans.rows_of(queries)
        if keep is not None:
            u = u[keep]
        cos_sin = tables.rows(spec, queries)
        a = ops.project(u, self.wq_a.packed, norm=self.q_norm.weight, eps=self._eps)
        q = ops.project(a, self.wq_b.packed, cos_sin=cos_sin, vectors=self._heads)
        q = q.view(q.shape[0], self._heads, -1)
        if spec.role in ("full", "reindex"):
            # Detached: in training the index branch learns from its own loss alone.
            index_q = self.indexer.queries(a.detach(), cos_sin)
            rows.select(spec, queries, index_q, self.indexer.head_weights(u.detach()))
        q_selected = None if self.kv_adapter is None else self.kv_adapter.to_queries(q)
        o, selected = rows.attend(spec, spans, window, queries, q, self.attn_sink, q_selected)
        if self.kv_adapter is not None and selected is not None:
            o = o + self.kv_adapter.to_outputs(selected)
        return ops.project_output(
            o, cos_sin, self.wo_a.packed, self.wo_b.packed, groups=self._groups
        )
