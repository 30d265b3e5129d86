"""A probe of window rows: which tokens does each query really see? Used by several tests.

Every token stores a window row that spells its own position, through the cache's own plans; the
probe stands in for the attention kernel and reads the rows back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.cached_rows import CachedRows, CallRules
from cedar.cache.state import ModelState
from cedar.config.model_config import ModelConfig
from cedar.formats.codec import decode_rows
from cedar.kernels.operators import PagedRows, Selection, WindowRows
from cedar.kernels.reference import ReferenceOperators
from cedar.model.spans import Spans


class _RecordingOperators(ReferenceOperators):
    """Keeps the window rows of the last attention call."""

    window: WindowRows

    def sparse_attention(
        self, q: Tensor, window: WindowRows, selected: PagedRows | None,
        selection: Selection | None, sequences: Tensor, sink: Tensor, *, scale: float,
        q_selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        self.window = window
        return q, None


class WindowProbe:
    """Window rows of layer 0 of a model, for sequences fed in any chunks.

    Args:
        config: layer 0 must be window-only.
    """

    def __init__(self, config: ModelConfig, *, batch: int) -> None:
        assert config.plan[0].role == "window"
        self.state = ModelState.contiguous(config, max_tokens=256, batch=batch)
        self.operators = _RecordingOperators()
        self._config = config

    @property
    def last_window(self) -> WindowRows:
        """Window rows of the last call."""
        return self.operators.window

    def attend(self, spans: Spans, queries: Spans | None = None) -> list[set[int]]:
        """Store the rows of `spans`; return the positions each query sees, as its rows spell them."""
        config, spec = self._config, self._config.plan[0]
        rules = CallRules(
            global_floor=(0,) * len(spans.sequences),
            fresh_decoder=False,
            index_key_rule="corrected",
        )
        rows = CachedRows(self.state, self.operators, rules)
        queries = queries or spans
        q = torch.zeros(queries.num_rows, config.num_attention_heads, config.head_dim)
        sink = torch.zeros(config.num_attention_heads)
        rows.attend(spec, spans, self.spell(spans), queries, q, sink, None)
        window = self.last_window
        seen = []
        for n in range(queries.num_rows):
            positions = torch.arange(int(window.lo[n]), int(window.hi[n]) + 1)
            stored = window.rows[window.base[n] + positions % window.modulus]
            values = decode_rows(stored, window.fmt)
            spelled = (values[:, 0] * 16 + values[:, 1]).long().tolist()
            assert spelled == positions.tolist(), "a slot holds another token's row"
            own = {int(queries.row_sequences[n])}
            assert set(values[:, 2].long().tolist()) <= own, "a row of another sequence"
            seen.append(set(spelled))
        return seen

    def spell(self, spans: Spans) -> Tensor:
        """Rows that spell (position, sequence) in numbers FP8 holds exactly."""
        rows = torch.zeros(spans.num_rows, self._config.head_dim)
        rows[:, 0], rows[:, 1] = spans.positions // 16, spans.positions % 16
        rows[:, 2] = spans.row_sequences.float()
        return rows
