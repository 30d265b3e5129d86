"""Chains of operators a layer always runs together, spelled out in single operators.

The reference backend inherits them as they stand; a native backend may replace each by one call. What a
chain computes is exactly what its parts compute one after another.
"""

from __future__ import annotations

from torch import Tensor

from cedar.kernels.operators import (
    AttentionWeights,
    FeedForwardWeights,
    Found,
    HyperWeights,
    IndexWeights,
    KeySearch,
    LayerWeights,
    Mixes,
    RingRows,
    SingleOperators,
    Weight,
)


class ComposedOperators(SingleOperators):
    """Mix-in: the chains, in terms of the single operators."""

    def project(
        self, x: Tensor, weight: Weight, *, norm: Tensor | None = None, eps: float = 0.0,
        cos_sin: Tensor | None = None, vectors: int = 1,
    ) -> Tensor:  # fmt: skip
        """Projection, then norm, then rotation; each optional step only if it is given.

        Args:
            x: `[N, in]`.   norm: weight over the whole output width.
            cos_sin: rotates each of `vectors` equal parts of a row.
        Returns: `[N, out]`, or `[N, vectors, out / vectors]` when vectors > 1.
        """
        out = self.linear(x, weight)
        if norm is not None:
            out = self.rms_norm(out, norm, eps)
        if vectors > 1:
            out = out.unflatten(-1, (vectors, -1))
        return out if cos_sin is None else self.rotate(out, cos_sin)

    def project_output(
        self, o: Tensor, cos_sin: Tensor, grouped: Weight, last: Weight, *, groups: int
    ) -> Tensor:
        """Attention output `[N, H, d]`: rotate back, project per group of heads, then together."""
        o = self.rotate(o, cos_sin, inverse=True)
        inner = self.grouped_linear(o.flatten(1).unflatten(1, (groups, -1)), grouped)
        return self.linear(inner, last)

    def collapse_norm(self, stream: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
        """`rms_norm(hc_collapse(stream, pre))`: `[N, C, D] -> [N, D]`."""
        return self.rms_norm(self.hc_collapse(stream, pre), norm, eps)

    def hc_turn(
        self, y: Tensor, stream: Tensor, mixes: Mixes, following: HyperWeights, norm: Tensor
    ) -> tuple[Tensor, Mixes, Tensor]:
        """From one sublayer to the next: expand, predict the next mixes, collapse and norm.

        Args:
            y: `[N, D]`, output of the first sublayer.   stream: at its entrance.   mixes: its own.
            following: weights of the next sublayer's mixes.   norm: its input norm.
        Returns: stream at the next sublayer's entrance, its mixes, its input `[N, D]` (collapsed with
            the `pre` of the first: the delayed rule of single-pass hyper-connections).
        """
        stream = self.hc_expand(y, stream, mixes)
        ahead = self.hc_mixes(
            stream, following.fn, following.base, following.scale, iters=following.iters,
            eps=following.eps, norm_eps=following.norm_eps,
        )  # fmt: skip
        return stream, ahead, self.collapse_norm(stream, mixes.pre, norm, following.norm_eps)

    def feed_forward(
        self, y: Tensor, stream: Tensor, weights: FeedForwardWeights
    ) -> tuple[Tensor, Tensor]:
        """Second half of a layer: mixes of the attention sublayer, turn, route, experts, expand.

        Args:
            y: `[N, D]`, output of the attention.   stream: `[N, C, D]`, at its entrance.
        Returns: stream leaving the layer `[N, C, D]`, and the pre mix `[N, C]` of what follows.
        """
        half, router = weights.attention, weights.router
        mixes = self.hc_mixes(
            stream, half.fn, half.base, half.scale, iters=half.iters, eps=half.eps,
            norm_eps=half.norm_eps,
        )  # fmt: skip
        stream, ahead, x = self.hc_turn(y, stream, mixes, weights.ffn, weights.norm)
        routing = self.route(
            x, router.gate, router.bias, topk=router.topk, scoring=router.scoring,
            normalise=router.normalise, scale=router.scale,
        )  # fmt: skip
        out = self.moe(x, routing, weights.experts, weights.shared, limit=weights.limit)
        return self.hc_expand(out, stream, ahead), ahead.pre

    def project_window(self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor) -> Tensor:
        """Normed and rotated window rows: `[N, D] -> [N, d]`."""
        return self.project(x, weights.wkv, norm=weights.kv_norm, eps=weights.eps, cos_sin=cos_sin)

    def project_queries(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normed latents and rotated queries: `[N, D] -> [N, rank], [N, H, d]`."""
        latent = self.project(x, weights.wq_a, norm=weights.q_norm, eps=weights.eps)
        q = self.project(latent, weights.wq_b, cos_sin=cos_sin, vectors=weights.heads)
        width = weights.wq_b.values.shape[0] // weights.heads
        return latent, q.view(q.shape[0], weights.heads, width)

    def project_attention(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`project_window` and `project_queries` of the same rows."""
        return self.project_window(x, weights, cos_sin), *self.project_queries(x, weights, cos_sin)

    def project_groups(self, x: Tensor, kv: Weight, gate: Weight) -> tuple[Tensor, Tensor]:
        """Both projections of a compressor above ratio 1, in float32: `[N, D] -> 2 * [N, d]`."""
        wide = x.float()
        return self.linear(wide, kv), self.linear(wide, gate)

    def attend_ring(
        self, window: Tensor, q: Tensor, rows: RingRows, weights: AttentionWeights, cos_sin: Tensor
    ) -> Tensor:
        """Store one window row per sequence in its ring, attend there, project the output.

        Args:
            window: `[N, d]`.   q: `[N, H, d]`.
        Returns: `[N, D]`.
        """
        near = rows.window
        self.store_rows(window, near.rows, rows.where, near.fmt)
        o, _ = self.sparse_attention(
            q, near, rows.selected, rows.selection, rows.sequences, weights.sink, scale=rows.scale
        )
        return self.project_output(o, cos_sin, weights.wo_a, weights.wo_b, groups=weights.groups)

    def search_keys(self, queries: Tensor, head_weights: Tensor, search: KeySearch) -> Found:
        """`index_pool` if the search builds a pool, `index_topk` if not.

        Args:
            queries: uint8 `[N, P, index row bytes]`, packed.   head_weights: float32 `[N, P]`.
        """
        keys, sequences, visible = search.keys, search.sequences, search.visible
        if search.num_blocks:
            return Found(
                *self.index_pool(
                    queries, head_weights, keys, sequences, visible, topk=search.topk,
                    num_blocks=search.num_blocks, block_size=search.block_size,
                )
            )  # fmt: skip
        selection = self.index_topk(
            queries, head_weights, keys, sequences, visible, topk=search.topk, pool=search.pool
        )
        return Found(selection, None)

    def select_rows(
        self, latent: Tensor, x: Tensor, weights: IndexWeights, cos_sin: Tensor, search: KeySearch
    ) -> Found:
        """Project index queries and their head weights, pack the queries, search.

        Args:
            latent: `[N, rank]`, normed query latents.   x: `[N, D]`, input of the layer.
        """
        heads, fmt = weights.head_weights.values.shape[0], search.keys.fmt
        queries = self.project(latent, weights.wq_b, cos_sin=cos_sin, vectors=heads)
        packed = self.pack_rows(queries.view(queries.shape[0], heads, fmt.width), fmt)
        head_weights = self.linear(x, weights.head_weights) * weights.scale
        return self.search_keys(packed, head_weights.float(), search)

    def layer_step(
        self, stream: Tensor, pre: Tensor, weights: LayerWeights, cos_sin: Tensor, rows: RingRows,
        search: KeySearch | None,
    ) -> tuple[Tensor, Tensor, Found | None]:  # fmt: skip
        """A whole layer for one token of each sequence; compressed rows are stored already.

        Args:
            stream: `[N, C, D]` and pre: `[N, C]`, at the entrance.
            search: of an index source, which attends to what it finds instead of `rows.selection`.
        Returns: stream and pre leaving the layer, and what the search found.
        """
        x = self.collapse_norm(stream, pre, weights.norm, weights.eps)
        window, latent, q = self.project_attention(x, weights.attention, cos_sin)
        found = None
        if search is not None and weights.index is not None:
            found = self.select_rows(latent, x, weights.index, cos_sin, search)
            rows = rows._replace(selection=found.selection)
        y = self.attend_ring(window, q, rows, weights.attention, cos_sin)
        return *self.feed_forward(y, stream, weights.feed_forward), found
