"""Chains of operators a layer always runs together, spelled out in single operators.

The reference backend inherits them as they stand; a native backend may replace each by one call. What a
chain computes is exactly what its parts compute one after another.
"""

from __future__ import annotations

from torch import Tensor

from cedar.kernels.operators import HyperWeights, Mixes, SingleOperators, Weight


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
