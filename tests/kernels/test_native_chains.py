"""Chains of a layer on the native operators: the bits of their parts called one by one.

`composed.ComposedOperators` says what a chain is; its definition runs here on the native single
operators. Every instruction-set variant this machine has is tried, with any number of rows, every kind
of weight and both activation dtypes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import draw, library_or_skip, same_bits, weight_of
from torch import Tensor

from cedar.errors import UsageError
from cedar.formats import codec
from cedar.formats.rows import RowFormat
from cedar.kernels.composed import ComposedOperators
from cedar.kernels.native.operators import NativeOperators
from cedar.kernels.operators import (
    AttentionWeights,
    Expert,
    FeedForwardWeights,
    HyperWeights,
    IndexWeights,
    KeySearch,
    LayerWeights,
    PagedRows,
    Pool,
    RingRows,
    Router,
    Selection,
    Weight,
    WindowRows,
)
from cedar.kernels.reference import ReferenceOperators

library_or_skip()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
COUNTS = st.sampled_from([0, 1, 2, 3, 16, 17, 40])
KINDS = st.sampled_from(["plain", "fp8", "fp4"])
EXAMPLES = settings(max_examples=20, deadline=None)


def hyper_of(seed: int, copies: int, width: int) -> HyperWeights:
    mixes = copies * (copies + 2)
    fn = draw(seed, mixes, copies * width) * (copies * width) ** -0.5
    return HyperWeights(fn, draw(seed + 1, mixes), draw(seed + 2, 3), 4, 1e-6, 1e-20)


def feed_forward_of(
    copies: int, kind: str, shared_kind: str, dtype: torch.dtype, *, width: int = 96,
    inner: int = 64, experts: int = 5,
) -> FeedForwardWeights:  # fmt: skip
    def expert(seed: int, kind: str) -> Expert:
        w1, w3 = (weight_of(seed + i, inner, width, kind, dtype) for i in (0, 1))
        return Expert(w1, w3, weight_of(seed + 2, width, inner, kind, dtype))

    gate = draw(1, experts, width, dtype=dtype) * width**-0.5
    return FeedForwardWeights(
        attention=hyper_of(10, copies, width), ffn=hyper_of(20, copies, width),
        norm=draw(2, width, dtype=dtype),
        router=Router(gate, 0.1 * draw(3, experts), 2, "sqrtsoftplus", True, 1.5),
        experts=[expert(100 + 10 * e, kind) for e in range(experts)],
        shared=expert(99, shared_kind), limit=0.5,
    )  # fmt: skip


def attention_of(
    kind: str, dtype: torch.dtype, *, heads: int = 4, dim: int = 64, groups: int = 2,
    inner: int = 32, width: int = 96, rank: int = 32,
) -> AttentionWeights:  # fmt: skip
    return AttentionWeights(
        wkv=weight_of(1, dim, width, kind, dtype), kv_norm=draw(2, dim, dtype=dtype),
        wq_a=weight_of(3, rank, width, kind, dtype), q_norm=draw(4, rank, dtype=dtype),
        wq_b=weight_of(5, heads * dim, rank, kind, dtype),
        wo_a=weight_of(6, groups * inner, heads // groups * dim, kind, dtype),
        wo_b=weight_of(7, width, groups * inner, kind, dtype),
        sink=draw(8, heads), eps=1e-20, heads=heads, groups=groups,
    )  # fmt: skip


def paged(seed: int, rows: int, fmt: RowFormat, sequences: int) -> PagedRows:
    """Random rows under block tables in a random order, four rows a block."""
    packed = codec.encode_rows(draw(seed, sequences * rows, fmt.width), fmt)
    order = torch.randperm(sequences * rows // 4, generator=torch.Generator().manual_seed(seed))
    return PagedRows(packed, order.view(sequences, -1).int(), 4, fmt)


def all_same(ours: object, theirs: object) -> bool:
    """Same bits, whatever the nesting of tuples."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return all(map(all_same, ours, theirs)) and len(ours) == len(theirs)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.shape == theirs.shape and same_bits(ours, theirs)
    return ours == theirs


@EXAMPLES
@given(count=COUNTS, copies=st.sampled_from([2, 4]), kind=KINDS, shared=KINDS, dtype=DTYPES)
def test_second_half_of_a_layer_equals_its_parts(
    native: NativeOperators, count: int, copies: int, kind: str, shared: str, dtype: torch.dtype
) -> None:
    weights = feed_forward_of(copies, kind, shared, dtype)
    y, stream = draw(30, count, 96, dtype=dtype), draw(31, count, copies, 96, dtype=dtype)
    before = stream.clone()
    ours = native.feed_forward(y, stream, weights)
    assert all_same(ours, ComposedOperators.feed_forward(native, y, stream, weights))
    assert same_bits(stream, before)


@EXAMPLES
@given(count=COUNTS, kind=KINDS, dtype=DTYPES)
def test_attention_projections_equal_their_parts(
    native: NativeOperators, count: int, kind: str, dtype: torch.dtype
) -> None:
    weights, x, table = (
        attention_of(kind, dtype),
        draw(1, count, 96, dtype=dtype),
        draw(2, count, 8, 2),
    )
    window = ComposedOperators.project_window(native, x, weights, table)
    queries = ComposedOperators.project_queries(native, x, weights, table)
    assert all_same(native.project_window(x, weights, table), window)
    assert all_same(native.project_queries(x, weights, table), queries)
    assert all_same(native.project_attention(x, weights, table), (window, *queries))


@EXAMPLES
@given(count=COUNTS, dtype=DTYPES, weights=DTYPES)
def test_compressor_projections_equal_their_parts(
    native: NativeOperators, count: int, dtype: torch.dtype, weights: torch.dtype
) -> None:
    kv, gate = (weight_of(i, 64, 96, "plain", weights) for i in (1, 2))
    x = draw(3, count, 96, dtype=dtype)
    ours = native.project_groups(x, kv, gate)
    assert all_same(ours, ComposedOperators.project_groups(native, x, kv, gate))
    # What the model did before: the weight itself widened.
    assert same_bits(ours[0], native.linear(x.float(), Weight(kv.values.float())))


def ring_rows(count: int, *, dim: int, far: bool) -> RingRows:
    """One token of each of `count` sequences at position 5 + sequence of a ring of 8."""
    fmt, main = RowFormat("window", dim), RowFormat("main", dim)
    rings = codec.encode_rows(draw(40, count * 8, dim), fmt)
    sequences = torch.arange(count, dtype=torch.int32)
    position = 5 + sequences
    base = sequences.long() * 8
    lo = (position - 7).clamp(min=0)
    near = WindowRows(rings, base, lo, position, 8, fmt)
    where = base + position % 8
    if not far:
        return RingRows(near, where, None, None, sequences, dim**-0.5)
    picks = torch.tensor([[0, 2, 3, 7, -1, -1]], dtype=torch.int32).repeat(count, 1)
    rows = paged(41, 8, main, count)
    return RingRows(near, where, rows, Selection(picks), sequences, dim**-0.5)


@EXAMPLES
@given(count=st.sampled_from([1, 2, 5, 18]), kind=KINDS, dtype=DTYPES, far=st.booleans(),
       inner=st.sampled_from([32, 48]))  # fmt: skip
def test_attention_in_the_rings_equals_its_parts(
    native: NativeOperators, count: int, kind: str, dtype: torch.dtype, far: bool, inner: int
) -> None:
    # An inner width of 48 makes a group of fp8 rows begin inside a scale tile, which has its own way.
    weights = attention_of(kind, dtype, inner=inner)
    window, q = draw(50, count, 64, dtype=dtype), draw(51, count, 4, 64, dtype=dtype)
    table = draw(52, count, 8, 2)
    mine, theirs = ring_rows(count, dim=64, far=far), ring_rows(count, dim=64, far=far)
    ours = native.attend_ring(window, q, mine, weights, table)
    expected = ComposedOperators.attend_ring(native, window, q, theirs, weights, table)
    assert all_same(ours, expected)
    assert same_bits(mine.window.rows, theirs.window.rows)


def test_a_ring_row_that_does_not_exist_is_refused(native: NativeOperators) -> None:
    weights, rows = attention_of("plain", torch.float32), ring_rows(2, dim=64, far=False)
    x, q, table = draw(1, 2, 64), draw(2, 2, 4, 64), draw(3, 2, 8, 2)
    for bad in (-1, 16):
        with pytest.raises(UsageError):
            native.attend_ring(x, q, rows._replace(where=torch.tensor([0, bad])), weights, table)


@EXAMPLES
@given(count=COUNTS, kind=KINDS, dtype=DTYPES, pool=st.sampled_from(["none", "build", "inside"]))
def test_selection_equals_its_parts(
    native: NativeOperators, count: int, kind: str, dtype: torch.dtype, pool: str
) -> None:
    weights = IndexWeights(
        wq_b=weight_of(1, 4 * 64, 32, kind, dtype),
        head_weights=weight_of(2, 4, 96, "plain", dtype),
        scale=64**-0.5 * 4**-0.5,
    )
    sequences = torch.arange(count, dtype=torch.int32) // 3
    keys = paged(3, 24, RowFormat("index", 64), max(1, (count + 2) // 3))
    visible = (7 * torch.arange(count) % 25).int()
    search = KeySearch(keys, sequences, visible, 6)
    if pool == "build":
        search = search._replace(num_blocks=2, block_size=4)
    if pool == "inside":
        blocks = torch.tensor([[0, 2, 3, -1]], dtype=torch.int32).repeat(count, 1)
        search = search._replace(pool=Pool(blocks, 4))
    latent, x = draw(4, count, 32, dtype=dtype), draw(5, count, 96, dtype=dtype)
    table = draw(6, count, 8, 2)
    ours = native.select_rows(latent, x, weights, table, search)
    expected = ComposedOperators.select_rows(native, latent, x, weights, table, search)
    assert all_same(ours, expected)


def test_head_weights_that_are_not_numbers_select_as_their_parts_do(
    native: NativeOperators,
) -> None:
    weights = IndexWeights(
        wq_b=weight_of(1, 4 * 64, 32, "plain", torch.bfloat16),
        head_weights=weight_of(2, 4, 96, "plain", torch.bfloat16),
        scale=64**-0.5 * 4**-0.5,
    )
    x = torch.full((2, 96), float("inf"), dtype=torch.bfloat16)
    x[1] = -3e38
    keys = paged(3, 24, RowFormat("index", 64), 1)
    search = KeySearch(keys, torch.zeros(2).int(), torch.full((2,), 20).int(), 6)
    latent, table = draw(4, 2, 32, dtype=torch.bfloat16), draw(6, 2, 8, 2)
    ours = native.select_rows(latent, x, weights, table, search)
    expected = ComposedOperators.select_rows(native, latent, x, weights, table, search)
    assert all_same(ours, expected)


@EXAMPLES
@given(count=st.sampled_from([1, 2, 5, 18]), kind=KINDS, dtype=DTYPES, far=st.booleans(),
       source=st.booleans(), inner=st.sampled_from([32, 48]))  # fmt: skip
def test_a_whole_layer_equals_its_parts(
    native: NativeOperators, count: int, kind: str, dtype: torch.dtype, far: bool, source: bool,
    inner: int,
) -> None:  # fmt: skip
    index = IndexWeights(
        wq_b=weight_of(1, 4 * 64, 32, kind, dtype),
        head_weights=weight_of(2, 4, 96, "plain", dtype),
        scale=64**-0.5 * 4**-0.5,
    )
    weights = LayerWeights(
        norm=draw(60, 96, dtype=dtype), eps=1e-20,
        attention=attention_of(kind, dtype, inner=inner), index=index if source else None,
        feed_forward=feed_forward_of(4, kind, "plain", dtype),
    )  # fmt: skip
    stream, pre = draw(61, count, 4, 96, dtype=dtype), draw(62, count, 4)
    table, search = draw(63, count, 8, 2), None
    mine = ring_rows(count, dim=64, far=far or source)
    theirs = ring_rows(count, dim=64, far=far or source)
    if source:
        keys = paged(3, 8, RowFormat("index", 64), count)
        visible = (7 * torch.arange(count) % 9).int()
        search = KeySearch(keys, mine.sequences, visible, 5, None, 2, 4)
        mine, theirs = (rows._replace(selection=None) for rows in (mine, theirs))
    before = stream.clone()
    ours = native.layer_step(stream, pre, weights, table, mine, search)
    expected = ComposedOperators.layer_step(native, stream, pre, weights, table, theirs, search)
    assert all_same(ours, expected)
    assert same_bits(mine.window.rows, theirs.window.rows)
    assert same_bits(stream, before)


@pytest.mark.parametrize("chain", ["feed_forward", "attend_ring", "select_rows"])
def test_a_row_of_a_chain_has_the_same_bits_on_any_number_of_threads(
    native: NativeOperators, chain: str
) -> None:
    dtype = torch.bfloat16
    y, stream = draw(30, 20, 96, dtype=dtype), draw(31, 20, 4, 96, dtype=dtype)
    half = feed_forward_of(4, "fp4", "fp8", dtype)
    attention, table = attention_of("fp8", dtype), draw(52, 20, 8, 2)
    q = draw(51, 20, 4, 64, dtype=dtype)
    index = IndexWeights(
        wq_b=weight_of(1, 4 * 64, 32, "fp8", dtype),
        head_weights=weight_of(2, 4, 96, "plain", dtype), scale=0.1,
    )  # fmt: skip
    keys = paged(3, 24, RowFormat("index", 64), 1)
    search = KeySearch(keys, torch.zeros(20).int(), torch.full((20,), 20).int(), 6)

    def run() -> object:
        if chain == "feed_forward":
            return native.feed_forward(y, stream, half)
        if chain == "attend_ring":
            rows = ring_rows(20, dim=64, far=True)
            return native.attend_ring(y[:, :64], q, rows, attention, table)
        return native.select_rows(y[:, :32], y, index, table, search)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = run()
        torch.set_num_threads(1)
        assert all_same(run(), two)
    finally:
        torch.set_num_threads(before)


def test_chains_of_the_reference_operators_have_gradients() -> None:
    ops = ReferenceOperators()
    weights = feed_forward_of(4, "plain", "plain", torch.float32)
    y, stream = draw(1, 3, 96).requires_grad_(), draw(2, 3, 4, 96).requires_grad_()
    out, pre = ops.feed_forward(y, stream, weights)
    (out.sum() + pre.sum()).backward()
    attention, table = attention_of("plain", torch.float32), draw(3, 3, 8, 2)
    x = draw(4, 3, 96).requires_grad_()
    sum(t.sum() for t in ops.project_attention(x, attention, table)).backward()  # type: ignore[union-attr]
    for leaf in (y, stream, x):
        assert leaf.grad is not None
        assert float(leaf.grad.abs().max()) > 0
