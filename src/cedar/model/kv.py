"""What a layer may ask of the rows of one call: the protocol between the model and its row stores.

`dense_rows.DenseRows` implements it without a cache (training, the uncached oracle);
`cedar.cache.cached_rows.CachedRows` implements it over packed pools and rings. A layer is handed
its rows as an argument; nothing is looked up by name and nothing is global.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from cedar.config.layer_plan import LayerSpec
from cedar.kernels.operators import Found, KeySearch, RingRows
from cedar.model.spans import Spans


class Groups(NamedTuple):
    """Compression groups completed by a call.

    Attributes:
        kv: `[G, ratio, d]` projections of the members, `[G, 1, d]` at ratio 1.
        gate: float32 `[G, ratio, d]`, None at ratio 1.
        positions: int64 `[G]`, position of each group's first token (where its row is rotated);
            the row's number in its sequence is position / ratio.
        sequences: int64 `[G]`, state slot of each group.
    """

    kv: Tensor
    gate: Tensor | None
    positions: Tensor
    sequences: Tensor


class Rows(Protocol):
    """Rows of the sequences of one call."""

    def complete_groups(
        self, spec: LayerSpec, spans: Spans, kv: Tensor, gate: Tensor | None
    ) -> Groups | None:
        """Add the projections of `spans` (`[N, d]`) to the open groups; return what closed.

        None where nothing closed and nothing need be stored.
        """
        ...

    def store(self, spec: LayerSpec, groups: Groups, main: Tensor, index: Tensor) -> None:
        """Keep the rows of completed groups: rotated latents `[G, d]`, rotated keys `[G, p]`."""
        ...

    def select(self, spec: LayerSpec, queries: Spans, index_q: Tensor, weights: Tensor) -> None:
        """Pick top-k rows for each query and publish them for the layers that reuse them.

        Args:
            index_q: `[n, P, p]`, rotated, not yet quantised.   weights: `[n, P]`.
        """
        ...

    def key_search(self, spec: LayerSpec, queries: Spans) -> KeySearch | None:
        """The search of an index source for `Operators.select_rows`; None: `select` does it."""
        ...

    def publish(self, spec: LayerSpec, queries: Spans, found: Found) -> None:
        """Keep what a search found for the layers that reuse it."""
        ...

    def in_ring(self, spec: LayerSpec, spans: Spans, queries: Spans) -> RingRows | None:
        """The rows of a call for `Operators.attend_ring`; None: `attend` does it."""
        ...

    def attend(
        self, spec: LayerSpec, spans: Spans, window: Tensor, queries: Spans, q: Tensor,
        sink: Tensor, q_selected: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Add window rows `[N, d]` (rotated) of `spans`, then attend with `q [n, H, d]` of `queries`.

        Returns: as `Operators.sparse_attention`.
        """
        ...
