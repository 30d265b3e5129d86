"""The operator set on the compiled kernels: addresses and strides in, packed rows read in place.

Chosen by `kernels.backends`. Results do not depend on the number of threads, nor on how many rows are
in a call: row i comes out bit-identical alone and in any batch. No gradients: training uses the
reference operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.formats.rows import RowFormat, RowKind
from cedar.kernels.composed import ComposedOperators
from cedar.kernels.native.layer_weights import (
    DTYPES,
    SCORING,
    AttentionBlock,
    FeedForwardBlock,
    IndexBlock,
    LayerBlock,
    weight_kind,
)
from cedar.kernels.native.library import NativeLibrary
from cedar.kernels.operators import (
    AttentionWeights,
    Expert,
    ExpertBank,
    FeedForwardWeights,
    Found,
    IndexWeights,
    KeySearch,
    LayerWeights,
    Mixes,
    PagedRows,
    Pool,
    RingRows,
    Routing,
    Selection,
    Weight,
    WindowRows,
    address_tables,
)
from cedar.kernels.reference import decode_weight

_ROW_KINDS: dict[RowKind, int] = {"window": 0, "main": 1, "index": 2}


def _needs_plain_output(weights: AttentionWeights) -> bool:
    """Whether a group of `wo_a` begins inside a 32x32 scale tile, which kernels refuse."""
    values = weights.wo_a.values
    return values.dtype == torch.float8_e4m3fn and values.shape[0] // weights.groups % 32 != 0


def _ring_arguments(rows: RingRows) -> tuple[int | None, ...]:
    """From the rings to the selection, in the order of the kernels."""
    near, far = rows.window, rows.selected
    ring = near.rows
    near_arguments = (
        ring.data_ptr(), ring.stride(0), ring.shape[0], rows.where.data_ptr(),
        near.base.data_ptr(), near.lo.data_ptr(), near.hi.data_ptr(), near.modulus,
    )  # fmt: skip
    sequences = rows.sequences.data_ptr()
    if far is None:
        return *near_arguments, None, 0, None, 0, 1, sequences, None, 0
    pool, tables, per_block, _ = far
    # An index source comes without a selection: it attends to what it finds.
    picks = None if rows.selection is None else rows.selection.positions
    assert picks is None or picks.is_contiguous()
    return (
        *near_arguments, pool.data_ptr(), pool.stride(0), tables.data_ptr(), tables.stride(0),
        per_block, sequences, _address(picks), 0 if picks is None else picks.shape[1],
    )  # fmt: skip


def _search_arguments(search: KeySearch | None, found: Found | None) -> tuple[int | None, ...]:
    """From the keys to what is found, in the order of the kernels; no search finds nothing."""
    if search is None or found is None:
        return 0, None, 0, None, 0, 1, None, None, 0, None, None, 0, 0, None
    keys, inside, built = search.keys, search.pool, found.pool
    assert inside is None or inside.blocks.is_contiguous()
    either = built or inside
    return (
        keys.fmt.row_bytes, keys.rows.data_ptr(), keys.rows.stride(0), keys.tables.data_ptr(),
        keys.tables.stride(0), keys.rows_per_block, search.sequences.data_ptr(),
        search.visible.data_ptr(), search.topk, None if inside is None else inside.blocks.data_ptr(),
        None if built is None else built.blocks.data_ptr(),
        0 if either is None else either.blocks.shape[1], 0 if either is None else either.block_size,
        found.selection.positions.data_ptr(),
    )  # fmt: skip


def _room_for(search: KeySearch, count: int) -> Found:
    """Empty results of a search."""
    positions = torch.empty(count, search.topk, dtype=torch.int32)
    built = None
    if search.num_blocks:
        blocks = torch.empty(count, search.num_blocks, dtype=torch.int32)
        built = Pool(blocks, search.block_size)
    return Found(Selection(positions), built)


def _query_rows(x: Tensor, weights: AttentionWeights) -> tuple[Tensor, Tensor]:
    """Room for query latents `[N, rank]` and queries `[N, H, d]`."""
    count, out, heads = x.shape[0], weights.wq_b.values.shape[0], weights.heads
    latent = torch.empty(count, weights.wq_a.values.shape[0], dtype=x.dtype)
    return latent, torch.empty(count, heads, out // heads, dtype=x.dtype)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeOperators(ComposedOperators):
    """The operator set in C++. Thread count is torch's, read at every call.

    Args:
        library: the loaded kernels.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._call = library.call
        self.name = f"native ({library.isa})"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._call(
            "rms_norm", x.data_ptr(), DTYPES[x.dtype], x.numel() // width, width,
            weight.data_ptr(), DTYPES[weight.dtype], eps, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        count = x.shape[0]
        width = x.shape[-1]
        per_row = x.numel() // max(1, count * width)
        self._call(
            "rotate", x.data_ptr(), DTYPES[x.dtype], count, per_row, width,
            cos_sin.contiguous().data_ptr(), 2 * cos_sin.shape[1], int(inverse), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def linear(self, x: Tensor, weight: Weight, *, quantise_input: bool = True) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        out_width = weight.values.shape[0]
        out = torch.empty(*x.shape[:-1], out_width, dtype=x.dtype)
        count = x.numel() // width
        if count == 0:  # no group closed in this call
            return out
        quantise = weight.scale is not None and quantise_input
        self._call(
            "linear", x.data_ptr(), DTYPES[x.dtype], width, count,
            weight.values.data_ptr(), _address(weight.scale), weight_kind(weight), out_width, width,
            int(quantise), out.data_ptr(), DTYPES[out.dtype], out_width, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        x = x.contiguous()
        count, groups, width = x.shape
        rank = weight.values.shape[0] // groups
        out = torch.empty(count, groups * rank, dtype=x.dtype)
        kind, threads = weight_kind(weight), torch.get_num_threads()
        scale = weight.scale
        if kind == 2 and rank % 32:
            # A group would begin inside a 32x32 scale tile: multiply by the plain weights.
            weight, kind = Weight(decode_weight(weight, x.dtype)), DTYPES[x.dtype]
            scale = None
        values, row_bytes = weight.values, weight.values.stride(0) * weight.values.element_size()
        rows_per_scale = 32 if kind == 2 else 1
        for group in range(groups):
            scale_at = None
            if scale is not None:
                scale_at = scale.data_ptr() + group * rank // rows_per_scale * scale.stride(0)
            self._call(
                "linear", x.data_ptr() + group * width * x.element_size(), DTYPES[x.dtype],
                groups * width, count, values.data_ptr() + group * rank * row_bytes, scale_at, kind,
                rank, width, 0, out.data_ptr() + group * rank * out.element_size(),
                DTYPES[out.dtype], groups * rank, threads,
            )  # fmt: skip
        return out

    def hc_mixes(
        self, stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float,
        norm_eps: float,
    ) -> Mixes:  # fmt: skip
        stream = stream.contiguous()
        count, copies, width = stream.shape
        pre, post = torch.empty(count, copies), torch.empty(count, copies)
        comb = torch.empty(count, copies, copies)
        self._call(
            "hc_mixes", stream.data_ptr(), DTYPES[stream.dtype], count, copies, width,
            fn.data_ptr(), base.data_ptr(), scale.data_ptr(), iters, eps, norm_eps, pre.data_ptr(),
            post.data_ptr(), comb.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return Mixes(pre, post, comb)

    def hc_collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        stream, pre = stream.contiguous(), pre.contiguous()
        count, copies, width = stream.shape
        out = torch.empty(count, width, dtype=stream.dtype)
        self._call(
            "hc_collapse", stream.data_ptr(), DTYPES[stream.dtype], count, copies, width,
            pre.data_ptr(), None, 0, 0.0, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def hc_expand(self, y: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
        y, stream = y.contiguous(), stream.contiguous()
        count, copies, width = stream.shape
        out = torch.empty_like(stream)
        self._call(
            "hc_expand", y.data_ptr(), stream.data_ptr(), DTYPES[stream.dtype], count, copies,
            width, mixes.post.data_ptr(), mixes.comb.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def project(
        self, x: Tensor, weight: Weight, *, norm: Tensor | None = None, eps: float = 0.0,
        cos_sin: Tensor | None = None, vectors: int = 1,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        count, width = x.shape
        values, scale = weight
        out_width = values.shape[0]
        shape = (count, out_width) if vectors == 1 else (count, vectors, out_width // vectors)
        out = torch.empty(shape, dtype=x.dtype)
        self._call(
            "project", x.data_ptr(), DTYPES[x.dtype], count, width, values.data_ptr(),
            None if scale is None else scale.data_ptr(), weight_kind(weight), out_width,
            int(scale is not None), None if norm is None else norm.data_ptr(),
            0 if norm is None else DTYPES[norm.dtype], eps,
            None if cos_sin is None else cos_sin.data_ptr(),
            0 if cos_sin is None else 2 * cos_sin.shape[1], vectors, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def project_output(
        self, o: Tensor, cos_sin: Tensor, grouped: Weight, last: Weight, *, groups: int
    ) -> Tensor:
        inner, width = grouped.values.shape[0], last.values.shape[0]
        if grouped.values.dtype == torch.float8_e4m3fn and inner // groups % 32:
            return super().project_output(o, cos_sin, grouped, last, groups=groups)
        o = o.contiguous()
        count, heads, dim = o.shape
        out = torch.empty(count, width, dtype=o.dtype)
        self._call(
            "project_output", o.data_ptr(), DTYPES[o.dtype], count, heads, dim, cos_sin.data_ptr(),
            2 * cos_sin.shape[1], groups, grouped.values.data_ptr(), _address(grouped.scale),
            weight_kind(grouped), inner, last.values.data_ptr(), _address(last.scale),
            weight_kind(last), width, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def collapse_norm(self, stream: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
        stream, pre = stream.contiguous(), pre.contiguous()
        count, copies, width = stream.shape
        out = torch.empty(count, width, dtype=stream.dtype)
        self._call(
            "hc_collapse", stream.data_ptr(), DTYPES[stream.dtype], count, copies, width,
            pre.data_ptr(), norm.data_ptr(), DTYPES[norm.dtype], eps, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def feed_forward(
        self, y: Tensor, stream: Tensor, weights: FeedForwardWeights
    ) -> tuple[Tensor, Tensor]:
        if weights.prepared is None:
            weights.prepared = FeedForwardBlock.of(weights)
        y, stream = y.contiguous(), stream.contiguous()
        count, copies, _ = stream.shape
        ahead, pre = torch.empty_like(stream), torch.empty(count, copies)
        self._call(
            "feed_forward", ctypes.addressof(weights.prepared), y.data_ptr(), stream.data_ptr(),
            DTYPES[stream.dtype], count, ahead.data_ptr(), pre.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return ahead, pre

    def project_window(self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor) -> Tensor:
        x = x.contiguous()
        window = torch.empty(x.shape[0], weights.wkv.values.shape[0], dtype=x.dtype)
        self._project_attention(x, weights, cos_sin, window.data_ptr(), None, None)
        return window

    def project_queries(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        latent, q = _query_rows(x, weights)
        self._project_attention(x, weights, cos_sin, None, latent.data_ptr(), q.data_ptr())
        return latent, q

    def project_attention(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()
        window = torch.empty(x.shape[0], weights.wkv.values.shape[0], dtype=x.dtype)
        latent, q = _query_rows(x, weights)
        self._project_attention(
            x, weights, cos_sin, window.data_ptr(), latent.data_ptr(), q.data_ptr()
        )
        return window, latent, q

    def project_groups(self, x: Tensor, kv: Weight, gate: Weight) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        count, width = x.shape
        out = kv.values.shape[0]
        both = torch.empty(2, count, out)
        first, second = both.unbind()
        self._call(
            "project_groups", x.data_ptr(), DTYPES[x.dtype], count, width, out,
            kv.values.data_ptr(), gate.values.data_ptr(), weight_kind(kv), first.data_ptr(),
            second.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return first, second

    def attend_ring(
        self, window: Tensor, q: Tensor, rows: RingRows, weights: AttentionWeights, cos_sin: Tensor
    ) -> Tensor:
        if _needs_plain_output(weights):
            return super().attend_ring(window, q, rows, weights, cos_sin)
        window, q = window.contiguous(), q.contiguous()
        count = q.shape[0]
        out = torch.empty(count, weights.wo_b.values.shape[0], dtype=q.dtype)
        self._call(
            "attend_ring", self._attention_block(weights), window.data_ptr(), q.data_ptr(),
            DTYPES[q.dtype], count, *_ring_arguments(rows), rows.scale, cos_sin.data_ptr(),
            2 * cos_sin.shape[1], out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def select_rows(
        self, latent: Tensor, x: Tensor, weights: IndexWeights, cos_sin: Tensor, search: KeySearch
    ) -> Found:
        if weights.prepared is None:
            weights.prepared = IndexBlock.of(weights)
        latent, x = latent.contiguous(), x.contiguous()
        found = _room_for(search, x.shape[0])
        self._call(
            "select_rows", ctypes.addressof(weights.prepared), latent.data_ptr(), x.data_ptr(),
            DTYPES[x.dtype], x.shape[0], cos_sin.data_ptr(), 2 * cos_sin.shape[1],
            *_search_arguments(search, found), torch.get_num_threads(),
        )  # fmt: skip
        return found

    def layer_step(
        self, stream: Tensor, pre: Tensor, weights: LayerWeights, cos_sin: Tensor, rows: RingRows,
        search: KeySearch | None,
    ) -> tuple[Tensor, Tensor, Found | None]:  # fmt: skip
        if _needs_plain_output(weights.attention):
            return super().layer_step(stream, pre, weights, cos_sin, rows, search)
        if weights.prepared is None:
            weights.prepared = LayerBlock.of(weights)
        stream, pre = stream.contiguous(), pre.contiguous()
        count = stream.shape[0]
        ahead, next_pre = torch.empty_like(stream), torch.empty_like(pre)
        found = None if search is None else _room_for(search, count)
        self._call(
            "layer_step", ctypes.addressof(weights.prepared), stream.data_ptr(), pre.data_ptr(),
            DTYPES[stream.dtype], count, cos_sin.data_ptr(), 2 * cos_sin.shape[1],
            *_ring_arguments(rows), rows.scale, *_search_arguments(search, found),
            ahead.data_ptr(), next_pre.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return ahead, next_pre, found

    def pool_groups(self, kv: Tensor, gate: Tensor) -> Tensor:
        kv, gate = kv.contiguous(), gate.contiguous()
        groups, ratio, width = kv.shape
        out = torch.empty(groups, width)
        self._call(
            "pool_groups", kv.data_ptr(), gate.data_ptr(), groups, ratio, width, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def pack_rows(self, x: Tensor, fmt: RowFormat) -> Tensor:
        out = torch.empty(*x.shape[:-1], fmt.row_bytes, dtype=torch.uint8)
        self._store(x, out, None, fmt)
        return out

    def store_rows(self, x: Tensor, rows: Tensor, where: Tensor, fmt: RowFormat) -> None:
        self._store(x, rows, where, fmt)

    def load_rows(self, rows: Tensor, where: Tensor, fmt: RowFormat) -> Tensor:
        out = torch.empty(where.shape[0], fmt.width)
        self._call(
            "load_rows", rows.data_ptr(), rows.stride(0), rows.shape[0], where.data_ptr(),
            where.shape[0], _ROW_KINDS[fmt.kind], fmt.width, out.data_ptr(), 0, fmt.width,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def index_topk(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, *, topk: int, pool: Pool | None = None,
    ) -> Selection:  # fmt: skip
        return self._index(queries, head_weights, keys, sequences, visible, topk, pool, None)

    def index_pool(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, *, topk: int, num_blocks: int, block_size: int,
    ) -> tuple[Selection, Pool]:  # fmt: skip
        blocks = torch.empty(queries.shape[0], num_blocks, dtype=torch.int32)
        pool = Pool(blocks, block_size)
        picked = self._index(queries, head_weights, keys, sequences, visible, topk, None, pool)
        return picked, pool

    def sparse_attention(
        self, q: Tensor, window: WindowRows, selected: PagedRows | None,
        selection: Selection | None, sequences: Tensor, sink: Tensor, *, scale: float,
        q_selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        q = q.contiguous()
        count, heads, width = q.shape
        out = torch.empty_like(q)
        other = None if q_selected is None else q_selected.contiguous()
        apart = None if other is None else torch.empty_like(q)
        rows, tables, per_block, picks, topk = None, None, 1, None, 0
        if selected is not None and selection is not None:
            rows, tables, per_block = selected.rows, selected.tables, selected.rows_per_block
            picks = selection.positions.contiguous()
            topk = picks.shape[1]
        self._call(
            "sparse_attention", q.data_ptr(), _address(other), DTYPES[q.dtype],
            window.rows.data_ptr(), window.rows.stride(0), window.base.data_ptr(),
            window.lo.data_ptr(), window.hi.data_ptr(), window.modulus,
            _address(rows), 0 if rows is None else rows.stride(0), _address(tables),
            0 if tables is None else tables.stride(0), per_block, sequences.data_ptr(),
            _address(picks), topk, sink.data_ptr(), scale, count, heads, width, out.data_ptr(),
            _address(apart), torch.get_num_threads(),
        )  # fmt: skip
        return out, apart

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, *, topk: int, scoring: str, normalise: bool,
        scale: float,
    ) -> Routing:  # fmt: skip
        x = x.contiguous()
        count, width = x.shape
        ids = torch.empty(count, topk, dtype=torch.int64)
        weights = torch.empty(count, topk)
        self._call(
            "route", x.data_ptr(), DTYPES[x.dtype], count, width, gate.data_ptr(),
            DTYPES[gate.dtype], bias.data_ptr(), bias.stride(0) if bias.dim() == 2 else 0,
            gate.shape[0], topk, SCORING[scoring], int(normalise), scale, ids.data_ptr(),
            weights.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return Routing(ids, weights)

    def moe(
        self,
        x: Tensor,
        routing: Routing,
        experts: Sequence[Expert],
        shared: Expert,
        *,
        limit: float,
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        bank = experts if isinstance(experts, ExpertBank) else ExpertBank(experts)
        first, own = bank[0], address_tables([shared.w1, shared.w3, shared.w2])
        ids, weights = routing.experts.contiguous(), routing.weights.contiguous()
        self._call(
            "moe", x.data_ptr(), DTYPES[x.dtype], x.shape[0], x.shape[1], first.w1.values.shape[0],
            len(bank), ids.shape[1], ids.data_ptr(), weights.data_ptr(), weight_kind(first.w1),
            *bank.addresses, weight_kind(shared.w1), *own, limit,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _project_attention(
        self, x: Tensor, weights: AttentionWeights, cos_sin: Tensor, window: int | None,
        latent: int | None, q: int | None,
    ) -> None:  # fmt: skip
        """Fill what has an address."""
        self._call(
            "project_attention", self._attention_block(weights), x.data_ptr(), DTYPES[x.dtype],
            x.shape[0], cos_sin.data_ptr(), 2 * cos_sin.shape[1], window, latent, q,
            torch.get_num_threads(),
        )  # fmt: skip

    def _attention_block(self, weights: AttentionWeights) -> int:
        if weights.prepared is None:
            weights.prepared = AttentionBlock.of(weights)
        return ctypes.addressof(weights.prepared)

    def _store(self, x: Tensor, rows: Tensor, where: Tensor | None, fmt: RowFormat) -> None:
        x = x.contiguous()
        count = x.numel() // fmt.width
        self._call(
            "store_rows", x.data_ptr(), DTYPES[x.dtype], fmt.width, count, _ROW_KINDS[fmt.kind],
            fmt.width, rows.data_ptr(), rows.stride(-2), rows.numel() // rows.shape[-1],
            _address(where), torch.get_num_threads(),
        )  # fmt: skip

    def _index(
        self, queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor,
        visible: Tensor, topk: int, pool: Pool | None, pool_out: Pool | None,
    ) -> Selection:  # fmt: skip
        queries, head_weights = queries.contiguous(), head_weights.contiguous()
        count, heads, _ = queries.shape
        out = torch.empty(count, topk, dtype=torch.int32)
        either = pool or pool_out
        blocks = None if pool is None else pool.blocks.contiguous()
        self._call(
            "index_topk", queries.data_ptr(), head_weights.data_ptr(), keys.rows.data_ptr(),
            keys.rows.stride(0), keys.tables.data_ptr(), keys.tables.stride(0), keys.rows_per_block,
            sequences.data_ptr(), visible.data_ptr(), count, heads, keys.fmt.width, topk,
            _address(blocks), None if pool_out is None else pool_out.blocks.data_ptr(),
            0 if either is None else either.blocks.shape[1],
            0 if either is None else either.block_size, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return Selection(out)
