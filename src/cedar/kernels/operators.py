"""The operator set: what the model may ask of a kernel backend, with shapes and dtypes.

`reference.ReferenceOperators` implements it in plain torch (differentiable where a gradient makes
sense); native backends implement the same calls and are tested against it. Operators take tensors
and numbers, never a config.

Legend for shapes:
    N rows of the call (all sequences, concatenated)   S sequences   C hyper-connection copies
    D hidden_size   H query heads   d head_dim   P index heads   p index_head_dim   K selected rows
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from cedar.formats.rows import RowFormat


class Weight(NamedTuple):
    """One projection `[out, in]`.

    Attributes:
        values: bfloat16 or float32 `[out, in]`; float8_e4m3fn `[out, in]`; or int8 `[out, in/2]`
            holding packed E2M1 pairs.
        scale: None for plain weights; E8M0 bytes (float8_e8m0fnu): `[ceil(out/32), ceil(in/32)]`
            for E4M3 values, `[out, in/32]` for packed E2M1.
    """

    values: Tensor
    scale: Tensor | None = None


class Expert(NamedTuple):
    """The three projections of one SwiGLU expert: gate `w1`, up `w3`, down `w2`."""

    w1: Weight
    w3: Weight
    w2: Weight


class ExpertBank(tuple[Expert, ...]):
    """The routed experts of one layer by id, with their addresses looked up once.

    Weights must not move while it is in use.
    """

    @cached_property
    def addresses(self) -> tuple[ctypes.Array[ctypes.c_void_p], ...]:
        """C arrays for native kernels: values and scales of w1, of w3, of w2, by expert."""
        tables: list[ctypes.Array[ctypes.c_void_p]] = []
        for name in ("w1", "w3", "w2"):
            tables += address_tables([getattr(expert, name) for expert in self])
        return tuple(tables)


def address_tables(weights: Sequence[Weight]) -> list[ctypes.Array[ctypes.c_void_p]]:
    """Addresses of values and of scales (null for plain weights)."""
    table = ctypes.c_void_p * len(weights)
    values = table(*(w.values.data_ptr() for w in weights))
    scales = table(*(None if w.scale is None else w.scale.data_ptr() for w in weights))
    return [values, scales]


class Mixes(NamedTuple):
    """Hyper-connection coefficients of N rows, float32: pre `[N, C]`, post `[N, C]`, comb `[N, C, C]`.

    `comb[n, i, j]` carries source copy i into destination copy j.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


class Routing(NamedTuple):
    """Chosen experts, highest biased score first: ids int64 `[N, k]`, weights float32 `[N, k]`."""

    experts: Tensor
    weights: Tensor


class PagedRows(NamedTuple):
    """Packed rows of one KV owner.

    Row j of sequence s is `rows[tables[s, j // rows_per_block] * rows_per_block + j % rows_per_block]`.

    Attributes:
        rows: uint8 `[R, row_bytes]`.
        tables: int32 `[S, B]`, block ids.
        rows_per_block: rows of this owner in one block.
        fmt: the row format.
    """

    rows: Tensor
    tables: Tensor
    rows_per_block: int
    fmt: RowFormat


class WindowRows(NamedTuple):
    """Packed window rows and which of them each query sees.

    Query n sees token positions `lo[n] .. hi[n]` (none when lo > hi); position q is
    `rows[base[n] + q % modulus]`.

    Attributes:
        rows: uint8 `[R, row_bytes]`.
        base: int64 `[N]`.   lo, hi: int32 `[N]`.   modulus: ring size, or huge for a linear buffer.
        fmt: the row format.
    """

    rows: Tensor
    base: Tensor
    lo: Tensor
    hi: Tensor
    modulus: int
    fmt: RowFormat


class Selection(NamedTuple):
    """Rows each query selected: int32 `[N, K]`, ascending, -1 = unused slot (at the end)."""

    positions: Tensor


class Pool(NamedTuple):
    """Candidate blocks per query: int32 `[N, blocks]`, ascending, -1 padded; and the block size."""

    blocks: Tensor
    block_size: int


class HyperWeights(NamedTuple):
    """Weights and constants that predict the mixes of one sublayer, see `SingleOperators.hc_mixes`."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    iters: int
    eps: float
    norm_eps: float


class Router(NamedTuple):
    """How rows choose experts, see `SingleOperators.route`."""

    gate: Tensor
    bias: Tensor
    topk: int
    scoring: str
    normalise: bool
    scale: float


@dataclass(kw_only=True, eq=False)
class ChainWeights:
    """Weights and constants of one chain of one layer. They must not move while it is in use.

    Attributes:
        prepared: what a native backend made of them, kept for the next call.
    """

    prepared: Any = field(default=None, init=False, repr=False)


@dataclass(kw_only=True, eq=False)
class FeedForwardWeights(ChainWeights):
    """Second half of a layer, see `composed.ComposedOperators.feed_forward`.

    Attributes:
        attention, ffn: mixes of the attention sublayer before it, and of its own.
        norm: of its input.   limit: of the experts' clamp.
    """

    attention: HyperWeights
    ffn: HyperWeights
    norm: Tensor
    router: Router
    experts: Sequence[Expert]
    shared: Expert
    limit: float


@dataclass(kw_only=True, eq=False)
class AttentionWeights(ChainWeights):
    """Projections of one attention layer: window rows, queries in two steps, output in two steps.

    Attributes:
        kv_norm, q_norm: after `wkv` and `wq_a`.   eps: of both.
        heads: query heads.   groups: of heads, for `wo_a`.   sink: float32 `[H]`.
    """

    wkv: Weight
    kv_norm: Tensor
    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wo_a: Weight
    wo_b: Weight
    sink: Tensor
    eps: float
    heads: int
    groups: int


@dataclass(kw_only=True, eq=False)
class IndexWeights(ChainWeights):
    """What an index source searches with.

    Attributes:
        wq_b: index queries from the query latent.   head_weights: from the layer's input.
        scale: of the head weights.
    """

    wq_b: Weight
    head_weights: Weight
    scale: float


@dataclass(kw_only=True, eq=False)
class LayerWeights(ChainWeights):
    """A whole layer, see `composed.ComposedOperators.layer_step`.

    Attributes:
        norm: of the attention input.   index: of an index source.
    """

    norm: Tensor
    eps: float
    attention: AttentionWeights
    index: IndexWeights | None
    feed_forward: FeedForwardWeights


class KeySearch(NamedTuple):
    """Where an index source searches: the arguments of `SingleOperators.index_topk`.

    Attributes:
        pool: search inside these blocks.
        num_blocks, block_size: of the pool to build, as `SingleOperators.index_pool`; 0 = none.
    """

    keys: PagedRows
    sequences: Tensor
    visible: Tensor
    topk: int
    pool: Pool | None = None
    num_blocks: int = 0
    block_size: int = 0


class Found(NamedTuple):
    """Result of a search: the selection, and the pool if one was built."""

    selection: Selection
    pool: Pool | None


class RingRows(NamedTuple):
    """Rows of a call with one token per sequence, which attends in the window rings.

    Attributes:
        window: the rings and what each query sees.   where: int64 `[N]`, ring row of each token.
        selected, selection, sequences, scale: as `SingleOperators.sparse_attention`.
    """

    window: WindowRows
    where: Tensor
    selected: PagedRows | None
    selection: Selection | None
    sequences: Tensor
    scale: float


class SingleOperators(Protocol):
    """The operators one by one."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, float32 inside, x's dtype out."""
        ...

    def rotate(self, x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate adjacent pairs of the last `2 * cos_sin.shape[1]` values of each row.

        Args:
            x: `[N, ..., d]`.   cos_sin: float32 `[N, rope/2, 2]`.
        """
        ...

    def linear(self, x: Tensor, weight: Weight, *, quantise_input: bool = True) -> Tensor:
        """`x @ weight^T`, `[N, in] -> [N, out]` in x's dtype, accumulated in float32.

        For E4M3 and E2M1 weights x is first quantised to E4M3 in groups of 32 (unless
        `quantise_input` is off).
        """
        ...

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """Block-diagonal projection: x `[N, G, in]`, weight `[G * rank, in]` -> `[N, G * rank]`.

        The input is not quantised (the reference program multiplies in bfloat16).
        """
        ...

    def hc_mixes(
        self, stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float,
        norm_eps: float,
    ) -> Mixes:  # fmt: skip
        """Predict the coefficients of one sublayer from the stream at its entrance.

        Args:
            stream: `[N, C, D]`.   fn: float32 `[C * (C + 2), C * D]`.
            base: float32 `[C * (C + 2)]`.   scale: float32 `[3]` for pre, post, comb.
        """
        ...

    def hc_collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        """`sum_c pre[c] * stream[c]`: `[N, C, D] -> [N, D]`."""
        ...

    def hc_expand(self, y: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
        """`post[j] * y + sum_i comb[i, j] * stream[i]`: `[N, D] -> [N, C, D]`."""
        ...

    def pool_groups(self, kv: Tensor, gate: Tensor) -> Tensor:
        """Softmax-pool groups of tokens per channel, float32: two `[G, r, d] -> [G, d]`."""
        ...

    def pack_rows(self, x: Tensor, fmt: RowFormat) -> Tensor:
        """Quantise `x [..., width]` to packed rows, uint8 `[..., row_bytes]`."""
        ...

    def store_rows(self, x: Tensor, rows: Tensor, where: Tensor, fmt: RowFormat) -> None:
        """Quantise `x [n, width]` and write it to `rows[where]` (uint8 `[R, row_bytes]`)."""
        ...

    def load_rows(self, rows: Tensor, where: Tensor, fmt: RowFormat) -> Tensor:
        """Dequantise `rows[where]`: float32 `[n, width]`."""
        ...

    def index_topk(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, *, topk: int, pool: Pool | None = None,
    ) -> Selection:  # fmt: skip
        """Score index keys and keep the best `topk` per query; ties go to the lowest position.

        `score_j = sum_h weights[h] * relu(<q_h, k_j>)` over heads in ascending order in float32,
        with exact dot products of the FP4 values.

        Args:
            queries: uint8 `[N, P, index row bytes]`, packed.   head_weights: float32 `[N, P]`.
            sequences: int32 `[N]`, row of `keys.tables`.   visible: int32 `[N]`, keys that exist
            for the query.   pool: restrict to these blocks.
        """
        ...

    def index_pool(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, *, topk: int, num_blocks: int, block_size: int,
    ) -> tuple[Selection, Pool]:  # fmt: skip
        """`index_topk` over everything, plus the candidate pool for later index sources.

        A block's score is the best score inside it; the block of the newest visible position is
        always kept; the `num_blocks` best are kept, ties to the lowest block.
        """
        ...

    def sparse_attention(
        self, q: Tensor, window: WindowRows, selected: PagedRows | None,
        selection: Selection | None, sequences: Tensor, sink: Tensor, *, scale: float,
        q_selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of each query over its window and its selected rows, with a sink per head.

        `softmax` over the union of both, the sink logit adds to the denominator only; keys equal
        values. A query with no row gives zeros.

        Args:
            q: `[N, H, d]`.   sink: float32 `[H]`.
            q_selected: other queries for the selected rows (a KV adapter folded into them); then
                the two parts of the output come back separately.
        Returns: `[N, H, d]` and None, or the window part and the selected part.
        """
        ...

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, *, topk: int, scoring: str, normalise: bool,
        scale: float,
    ) -> Routing:  # fmt: skip
        """Choose experts by score + bias, weigh them by the unbiased score.

        Args:
            x: `[N, D]`.   gate: `[E, D]`.   bias: float32 `[E]` or, per row, `[N, E]`.
        """
        ...

    def moe(
        self,
        x: Tensor,
        routing: Routing,
        experts: Sequence[Expert],
        shared: Expert,
        *,
        limit: float,
    ) -> Tensor:
        """Routed experts in ascending id plus the shared expert, float32 sum, `[N, D] -> [N, D]`."""
        ...


class Operators(SingleOperators, Protocol):
    """One kernel backend: the single operators and the chains of `composed.ComposedOperators`."""

    def project(
        self, x: Tensor, weight: Weight, *, norm: Tensor | None = None, eps: float = 0.0,
        cos_sin: Tensor | None = None, vectors: int = 1,
    ) -> Tensor:  # fmt: skip
        """Projection, then norm, then rotation."""
        ...

    def project_output(
        self, o: Tensor, cos_sin: Tensor, grouped: Weight, last: Weight, *, groups: int
    ) -> Tensor:
        """Attention output: rotate back, grouped projection, final projection."""
        ...

    def collapse_norm(self, stream: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Collapse of a stream, normed."""
        ...

    def hc_turn(
        self, y: Tensor, stream: Tensor, mixes: Mixes, following: HyperWeights, norm: Tensor
    ) -> tuple[Tensor, Mixes, Tensor]:
        """Expand, next mixes, collapse and norm."""
        ...

    def feed_forward(
        self, y: Tensor, stream: Tensor, weights: FeedForwardWeights
    ) -> tuple[Tensor, Tensor]:
        """From the attention output to the stream leaving the layer and its pre mix."""
        ...

    def project_window(self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor) -> Tensor:
        """Window rows."""
        ...

    def project_queries(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Query latents and queries."""
        ...

    def project_attention(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Window rows, query latents and queries."""
        ...

    def project_groups(self, x: Tensor, kv: Weight, gate: Weight) -> tuple[Tensor, Tensor]:
        """Both projections of a compressor, in float32."""
        ...

    def attend_ring(
        self, window: Tensor, q: Tensor, rows: RingRows, weights: AttentionWeights, cos_sin: Tensor
    ) -> Tensor:
        """Store the window rows, attend, project the output."""
        ...

    def search_keys(self, queries: Tensor, head_weights: Tensor, search: KeySearch) -> Found:
        """`index_pool` or `index_topk`, as the search says."""
        ...

    def select_rows(
        self, latent: Tensor, x: Tensor, weights: IndexWeights, cos_sin: Tensor, search: KeySearch
    ) -> Found:
        """Index queries, their head weights, and the search."""
        ...

    def layer_step(
        self, stream: Tensor, pre: Tensor, weights: LayerWeights, cos_sin: Tensor, rows: RingRows,
        search: KeySearch | None,
    ) -> tuple[Tensor, Tensor, Found | None]:  # fmt: skip
        """A whole layer for one token of each sequence."""
        ...
