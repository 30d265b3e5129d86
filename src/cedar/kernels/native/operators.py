"""The operator set on the compiled kernels: addresses and strides in, packed rows read in place.

Chosen by `kernels.backends`. Results do not depend on the number of threads, nor on how many rows are
in a call: row i comes out bit-identical alone and in any batch. No gradients: training uses the
reference operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.formats.rows import RowFormat, RowKind
from cedar.kernels.composed import ComposedOperators
from cedar.kernels.native.library import NativeLibrary
from cedar.kernels.operators import (
    Expert,
    ExpertBank,
    HyperWeights,
    Mixes,
    PagedRows,
    Pool,
    Routing,
    Selection,
    Weight,
    WindowRows,
    address_tables,
)
from cedar.kernels.reference import decode_weight

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ROW_KINDS: dict[RowKind, int] = {"window": 0, "main": 1, "index": 2}
_SCORING = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


def _weight_kind(weight: Weight) -> int:
    if weight.scale is None:
        return _DTYPES[weight.values.dtype]
    return 3 if weight.values.dtype == torch.int8 else 2


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
            "rms_norm", x.data_ptr(), _DTYPES[x.dtype], x.numel() // width, width,
            weight.data_ptr(), _DTYPES[weight.dtype], eps, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        count = x.shape[0]
        width = x.shape[-1]
        per_row = x.numel() // max(1, count * width)
        self._call(
            "rotate", x.data_ptr(), _DTYPES[x.dtype], count, per_row, width,
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
            "linear", x.data_ptr(), _DTYPES[x.dtype], width, count,
            weight.values.data_ptr(), _address(weight.scale), _weight_kind(weight), out_width, width,
            int(quantise), out.data_ptr(), _DTYPES[out.dtype], out_width, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        x = x.contiguous()
        count, groups, width = x.shape
        rank = weight.values.shape[0] // groups
        out = torch.empty(count, groups * rank, dtype=x.dtype)
        kind, threads = _weight_kind(weight), torch.get_num_threads()
        scale = weight.scale
        if kind == 2 and rank % 32:
            # A group would begin inside a 32x32 scale tile: multiply by the plain weights.
            weight, kind = Weight(decode_weight(weight, x.dtype)), _DTYPES[x.dtype]
            scale = None
        values, row_bytes = weight.values, weight.values.stride(0) * weight.values.element_size()
        rows_per_scale = 32 if kind == 2 else 1
        for group in range(groups):
            scale_at = None
            if scale is not None:
                scale_at = scale.data_ptr() + group * rank // rows_per_scale * scale.stride(0)
            self._call(
                "linear", x.data_ptr() + group * width * x.element_size(), _DTYPES[x.dtype],
                groups * width, count, values.data_ptr() + group * rank * row_bytes, scale_at, kind,
                rank, width, 0, out.data_ptr() + group * rank * out.element_size(),
                _DTYPES[out.dtype], groups * rank, threads,
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
            "hc_mixes", stream.data_ptr(), _DTYPES[stream.dtype], count, copies, width,
            fn.data_ptr(), base.data_ptr(), scale.data_ptr(), iters, eps, norm_eps, pre.data_ptr(),
            post.data_ptr(), comb.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return Mixes(pre, post, comb)

    def hc_collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        stream, pre = stream.contiguous(), pre.contiguous()
        count, copies, width = stream.shape
        out = torch.empty(count, width, dtype=stream.dtype)
        self._call(
            "hc_collapse", stream.data_ptr(), _DTYPES[stream.dtype], count, copies, width,
            pre.data_ptr(), None, 0, 0.0, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def hc_expand(self, y: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
        y, stream = y.contiguous(), stream.contiguous()
        count, copies, width = stream.shape
        out = torch.empty_like(stream)
        self._call(
            "hc_expand", y.data_ptr(), stream.data_ptr(), _DTYPES[stream.dtype], count, copies,
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
            "project", x.data_ptr(), _DTYPES[x.dtype], count, width, values.data_ptr(),
            None if scale is None else scale.data_ptr(), _weight_kind(weight), out_width,
            int(scale is not None), None if norm is None else norm.data_ptr(),
            0 if norm is None else _DTYPES[norm.dtype], eps,
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
            "project_output", o.data_ptr(), _DTYPES[o.dtype], count, heads, dim, cos_sin.data_ptr(),
            2 * cos_sin.shape[1], groups, grouped.values.data_ptr(), _address(grouped.scale),
            _weight_kind(grouped), inner, last.values.data_ptr(), _address(last.scale),
            _weight_kind(last), width, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def collapse_norm(self, stream: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
        stream, pre = stream.contiguous(), pre.contiguous()
        count, copies, width = stream.shape
        out = torch.empty(count, width, dtype=stream.dtype)
        self._call(
            "hc_collapse", stream.data_ptr(), _DTYPES[stream.dtype], count, copies, width,
            pre.data_ptr(), norm.data_ptr(), _DTYPES[norm.dtype], eps, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def hc_turn(
        self, y: Tensor, stream: Tensor, mixes: Mixes, following: HyperWeights, norm: Tensor
    ) -> tuple[Tensor, Mixes, Tensor]:
        y, stream = y.contiguous(), stream.contiguous()
        count, copies, width = stream.shape
        ahead, out = torch.empty_like(stream), torch.empty_like(y)
        pre, post = torch.empty(count, copies), torch.empty(count, copies)
        comb = torch.empty(count, copies, copies)
        self._call(
            "hc_turn", y.data_ptr(), stream.data_ptr(), _DTYPES[stream.dtype], count, copies, width,
            mixes.pre.data_ptr(), mixes.post.data_ptr(), mixes.comb.data_ptr(),
            following.fn.data_ptr(), following.base.data_ptr(), following.scale.data_ptr(),
            following.iters, following.eps, following.norm_eps, norm.data_ptr(),
            _DTYPES[norm.dtype], ahead.data_ptr(), pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return ahead, Mixes(pre, post, comb), out

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
            "sparse_attention", q.data_ptr(), _address(other), _DTYPES[q.dtype],
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
            "route", x.data_ptr(), _DTYPES[x.dtype], count, width, gate.data_ptr(),
            _DTYPES[gate.dtype], bias.data_ptr(), bias.stride(0) if bias.dim() == 2 else 0,
            gate.shape[0], topk, _SCORING[scoring], int(normalise), scale, ids.data_ptr(),
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
            "moe", x.data_ptr(), _DTYPES[x.dtype], x.shape[0], x.shape[1], first.w1.values.shape[0],
            len(bank), ids.shape[1], ids.data_ptr(), weights.data_ptr(), _weight_kind(first.w1),
            *bank.addresses, _weight_kind(shared.w1), *own, limit,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _store(self, x: Tensor, rows: Tensor, where: Tensor | None, fmt: RowFormat) -> None:
        x = x.contiguous()
        count = x.numel() // fmt.width
        self._call(
            "store_rows", x.data_ptr(), _DTYPES[x.dtype], fmt.width, count, _ROW_KINDS[fmt.kind],
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
