"""`TrainingRows`: the rows of one training step, with gradients and the index branch's loss.

Dense phase: queries attend to every visible compressed row. Sparse phase: to their top-k. In both
the index branch learns, by KL, to predict where the attention of its own layer goes; its inputs are
detached in the model, so nothing else sees that loss. Called by the model through `model/kv.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.config.layer_plan import LayerPlan, LayerSpec
from cedar.formats.codec import fake_quantise
from cedar.formats.rows import RowKind
from cedar.model.dense_rows import DenseRows
from cedar.model.spans import Spans
from cedar.training.blocked_attention import BlockShape, blocked_attention, window_mask
from cedar.training.kernels import Kernels
from cedar.training.losses import index_loss


@dataclass(frozen=True)
class Phase:
    """What is switched on.

    Attributes:
        sparse: attend to the top-k rows only.   quantise: straight-through fake quantisation of
            rows (and, in the operators, of weights).   index_queries: queries per sequence whose
            attention teaches the index branch; 0 = none.
    """

    sparse: bool = False
    quantise: bool = False
    index_queries: int = 32


class TrainingRows(DenseRows):
    """See the module docstring.

    Attributes:
        losses: KL of each index source of this call.
    """

    def __init__(
        self, plan: LayerPlan, *, batch: int, length: int, scale: float, phase: Phase,
        kernels: Kernels, generator: torch.Generator,
    ) -> None:  # fmt: skip
        super().__init__(plan, batch=batch, length=length, scale=scale)
        self._phase, self._kernels, self._generator = phase, kernels, generator
        self._index: dict[int, tuple[Tensor, Tensor]] = {}
        self._near_mask: Tensor | None = None
        self.losses: list[Tensor] = []

    def quantised(self, x: Tensor, kind: RowKind) -> Tensor:
        """Straight-through: the forward value is the stored row's, the gradient passes unchanged."""
        if not self._phase.quantise:
            return x
        if kind == "main":
            return x + (fake_quantise(x.detach(), kind) - x.detach())
        return (
            self._kernels.through_act(x)
            if kind == "window"
            else self._kernels.through_fp4(x, x.dtype)
        )

    def select(self, spec: LayerSpec, queries: Spans, index_q: Tensor, weights: Tensor) -> None:
        """Keep the branch for its loss; in the sparse phase also publish the top-k mask."""
        if self._phase.sparse:
            super().select(spec, queries, index_q, weights)
        self._index[spec.layer_id] = (index_q, weights)

    def allowed(self, spec: LayerSpec) -> Tensor:
        """Compressed rows each query may read, bool `[B or 1, T, n]`."""
        assert spec.kv_owner is not None and spec.topk_owner is not None
        if self._phase.sparse:
            return self.selections[spec.topk_owner]
        count = self.main[spec.kv_owner].shape[1]
        return (torch.arange(count) < self.visible(spec).unsqueeze(1)).unsqueeze(0)

    def mask(self, spec: LayerSpec) -> Tensor:
        """As in the base class, for the path that is not blocked."""
        if spec.topk_owner is not None and not self._phase.sparse:
            self.selections[spec.topk_owner] = self.allowed(spec).expand(self._batch, -1, -1)
        return super().mask(spec)

    def attend(
        self, spec: LayerSpec, spans: Spans, window: Tensor, queries: Spans, q: Tensor,
        sink: Tensor, q_selected: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Blocked attention where it applies, the dense oracle elsewhere; and the index loss."""
        size = self._plan.sliding_window
        if spec.layer_id in self._index and self._phase.index_queries:
            self._teach(spec, window, q if q_selected is None else q_selected, q, sink)
        if q_selected is not None or self._length % size:
            return super().attend(spec, spans, window, queries, q, sink, q_selected)
        shape = BlockShape(self._batch, self._length, q.shape[1], size, self._scale)
        if self._near_mask is None:
            self._near_mask = window_mask(shape)
        near = self.quantised(window, "window").unflatten(0, (self._batch, -1))
        far, far_mask = None, None
        seen = torch.zeros(self._length, dtype=torch.int32)
        if spec.kv_owner is not None:
            far, far_mask = self.main[spec.kv_owner], self.allowed(spec)
            seen = self.visible(spec).int()
        split = q.unflatten(0, (self._batch, -1))
        out = blocked_attention(
            split, near, far, sink, self._near_mask, far_mask, seen, shape, self._kernels
        )
        return out.flatten(0, 1), None

    def _teach(
        self, spec: LayerSpec, window: Tensor, q_far: Tensor, q: Tensor, sink: Tensor
    ) -> None:
        """Index loss on random queries of each sequence against this layer's own attention."""
        assert spec.kv_owner is not None
        count = min(self._phase.index_queries, self._length)
        index_q, weights = self._index.pop(spec.layer_id)
        chosen = torch.randperm(self._length, generator=self._generator)[:count].sort().values
        far, keys = self.main[spec.kv_owner], self.index[spec.kv_owner]
        allowed = self.allowed(spec)[:, chosen].expand(self._batch, -1, -1)

        def picked(x: Tensor) -> Tensor:
            return x.unflatten(0, (self._batch, -1))[:, chosen]

        with torch.no_grad():
            near = window.unflatten(0, (self._batch, -1)).float()
            back = chosen.unsqueeze(1) - torch.arange(self._length)
            seen = (back >= 0) & (back < self._plan.sliding_window)
            z_near = torch.einsum("bthd,bed->bhte", picked(q).float(), near) * self._scale
            z_far = torch.einsum("bthd,bed->bhte", picked(q_far).float(), far.float()) * self._scale
            z = torch.cat(
                (
                    z_near.masked_fill(~seen, float("-inf")),
                    z_far.masked_fill(~allowed.unsqueeze(1), float("-inf")),
                    sink.float().view(1, -1, 1, 1).expand(self._batch, -1, count, 1),
                ),
                -1,
            )
            mass = torch.softmax(z, -1)[..., self._length : -1].sum(1)
        queries = self.quantised(picked(index_q), "index").float()
        dots = torch.einsum("btpi,bji->btpj", queries, keys.float()).relu()
        scores = torch.einsum("btp,btpj->btj", picked(weights).float(), dots)
        loss, _ = index_loss(scores.flatten(0, 1), mass.flatten(0, 1), allowed.flatten(0, 1))
        self.losses.append(loss)
