"""Rows without a cache: every row of the call in memory, dense masked attention. The oracle.

Used by `causal_lm.score` (what every cached path is compared with) and, with gradients, by
training, which subclasses it. All sequences start at position 0 and have one length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.config.layer_plan import LayerPlan, LayerSpec
from cedar.formats.codec import fake_quantise
from cedar.formats.rows import RowKind
from cedar.kernels.operators import Found, KeySearch, RingRows
from cedar.kernels.reference_index import (
    block_mask,
    index_scores,
    pool_mask,
    positions_of,
    topk_mask,
)
from cedar.model.kv import Groups
from cedar.model.spans import Spans


class DenseRows:
    """Rows of B sequences of T tokens.

    Attributes:
        selections: bool `[B, T, n]` per index source.
        candidates: bool `[B, T, n]` pool of the candidate source, once it has run.
        main, index: float `[B, n, d]` and `[B, n, p]` per KV owner, fake-quantised.
        windows: float `[B, T, d]` per layer, fake-quantised.
    """

    def __init__(self, plan: LayerPlan, *, batch: int, length: int, scale: float) -> None:
        self._plan, self._batch, self._length, self._scale = plan, batch, length, scale
        self.main: dict[int, Tensor] = {}
        self.index: dict[int, Tensor] = {}
        self.windows: dict[int, Tensor] = {}
        self.selections: dict[int, Tensor] = {}
        self.candidates: Tensor | None = None

    def quantised(self, x: Tensor, kind: RowKind) -> Tensor:
        """What a reader of the stored row sees; training overrides it."""
        return fake_quantise(x, kind)

    def complete_groups(
        self, spec: LayerSpec, spans: Spans, kv: Tensor, gate: Tensor | None
    ) -> Groups:
        """Whole groups of each sequence; an incomplete last group leaves nothing."""
        ratio, count = spec.compress_ratio, self._length // spec.compress_ratio

        def grouped(x: Tensor) -> Tensor:
            whole = x.unflatten(0, (self._batch, self._length))[:, : count * ratio]
            return whole.reshape(self._batch * count, ratio, x.shape[-1])

        positions = (torch.arange(count) * ratio).repeat(self._batch)
        sequences = torch.arange(self._batch).repeat_interleave(count)
        return Groups(grouped(kv), None if gate is None else grouped(gate), positions, sequences)

    def store(self, spec: LayerSpec, groups: Groups, main: Tensor, index: Tensor) -> None:
        """Keep the fake-quantised rows of an owner."""
        shape = (self._batch, groups.positions.shape[0] // self._batch)
        self.main[spec.layer_id] = self.quantised(main, "main").unflatten(0, shape)
        self.index[spec.layer_id] = self.quantised(index, "index").unflatten(0, shape)

    def visible(self, spec: LayerSpec) -> Tensor:
        """Rows that exist for each query, int64 `[T]`: floor((t + 1) / ratio)."""
        return (torch.arange(self._length) + 1) // spec.compress_ratio

    def select(self, spec: LayerSpec, queries: Spans, index_q: Tensor, weights: Tensor) -> None:
        """Publish the top-k mask of an index source."""
        assert spec.kv_owner is not None
        keys = self.index[spec.kv_owner]
        visible = self.visible(spec)
        unseen = torch.arange(keys.shape[1]) >= visible.unsqueeze(1)
        index_q = self.quantised(index_q.detach(), "index").unflatten(0, (self._batch, -1)).float()
        head_weights = weights.detach().float().unflatten(0, (self._batch, -1))
        masks, pools = [], []
        for b in range(self._batch):
            scores = index_scores(index_q[b], head_weights[b], keys[b].detach().float())
            scores = scores.masked_fill(unseen, float("-inf"))
            if spec.candidate == "source":
                pools.append(self._pool(scores, visible))
            elif spec.candidate == "consumer":
                assert self.candidates is not None
                scores = scores.masked_fill(~self.candidates[b], float("-inf"))
            masks.append(topk_mask(scores, self._plan.index_topk))
        self.selections[spec.layer_id] = torch.stack(masks)
        if pools:
            self.candidates = torch.stack(pools)

    def key_search(self, spec: LayerSpec, queries: Spans) -> KeySearch | None:
        """None: there are no packed keys to search."""
        return None

    def publish(self, spec: LayerSpec, queries: Spans, found: Found) -> None:
        """Never called: no search was handed out."""
        raise NotImplementedError

    def in_ring(self, spec: LayerSpec, spans: Spans, queries: Spans) -> RingRows | None:
        """None: there are no rings."""
        return None

    def _pool(self, scores: Tensor, visible: Tensor) -> Tensor:
        plan = self._plan
        if scores.shape[1] == 0:
            return torch.zeros_like(scores, dtype=torch.bool)
        kept = block_mask(scores, visible, plan.candidate_topk_blocks, plan.candidate_block_size)
        blocks = positions_of(kept, plan.candidate_topk_blocks)
        return pool_mask(blocks, plan.candidate_block_size, scores.shape[1])

    def mask(self, spec: LayerSpec) -> Tensor:
        """Visible entries of each query, bool `[B, T, T + n]`: window columns, then selected rows."""
        t = torch.arange(self._length)
        back = t.unsqueeze(1) - t
        near = ((back >= 0) & (back < self._plan.sliding_window)).expand(self._batch, -1, -1)
        if spec.topk_owner is None:
            return near
        return torch.cat((near, self.selections[spec.topk_owner]), -1)

    def attend(
        self, spec: LayerSpec, spans: Spans, window: Tensor, queries: Spans, q: Tensor,
        sink: Tensor, q_selected: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Dense masked attention over window rows and compressed rows."""
        near = self.quantised(window, "window").unflatten(0, (self._batch, -1))
        self.windows[spec.layer_id] = near
        far = None if spec.kv_owner is None else self.main[spec.kv_owner]
        values = near if far is None else torch.cat((near, far), 1)
        q = q.unflatten(0, (self._batch, -1))
        other = None if q_selected is None else q_selected.unflatten(0, (self._batch, -1))
        out, selected = self.dense_attention(
            q, values, self.mask(spec), sink, split=self._length, other=other
        )
        return out.flatten(0, 1), None if selected is None else selected.flatten(0, 1)

    def dense_attention(
        self, q: Tensor, values: Tensor, mask: Tensor, sink: Tensor, *, split: int,
        other: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Softmax with a sink; q `[B, T, H, d]`, values `[B, E, d]`, mask `[B, T, E]`."""
        values = values.float()
        scores = torch.einsum("bthd,bed->bhte", q.float(), values)
        if other is not None:
            tail = torch.einsum("bthd,bed->bhte", other.float(), values[:, split:])
            scores = torch.cat((scores[..., :split], tail), -1)
        scores = (scores * self._scale).masked_fill(~mask.unsqueeze(1), float("-inf"))
        top = scores.amax(-1, keepdim=True).detach()
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1, 1) - top)
        total = total.transpose(1, 2)
        weights = weights.to(q.dtype).float()
        if other is None:
            return (torch.einsum("bhte,bed->bthd", weights, values) / total).to(q.dtype), None
        near = torch.einsum("bhte,bed->bthd", weights[..., :split], values[:, :split]) / total
        far = torch.einsum("bhte,bed->bthd", weights[..., split:], values[:, split:]) / total
        return near.to(q.dtype), far.to(q.dtype)
