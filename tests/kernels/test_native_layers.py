"""Norms, rotary, hyper-connections, router, experts and their chains: native equals reference.

Every instruction-set variant this machine has is tried. Reduction orders differ from torch's, so float
results agree to a few units in the last place; a bfloat16 result may differ by one rounding of the
largest magnitude. What must be exact is: expert choices, and that a row comes out with the same bits
alone and in any batch, on any number of threads.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import draw, library_or_skip, weight_of
from torch import Tensor

from cedar.kernels.native.operators import NativeOperators
from cedar.kernels.operators import Expert, HyperWeights, Mixes, Routing
from cedar.kernels.reference import ReferenceOperators

library_or_skip()

REFERENCE = ReferenceOperators()
DTYPES = (torch.float32, torch.bfloat16)
COUNTS = st.sampled_from([1, 2, 3, 15, 16, 17, 40])
EXAMPLES = settings(max_examples=12, deadline=None)


def close(ours: Tensor, theirs: Tensor, relative: float = 3e-6) -> None:
    """Within `relative` of the largest magnitude; one bfloat16 rounding for bfloat16."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    bound = 2.0**-7 if ours.dtype == torch.bfloat16 else relative
    top = theirs.float().abs().max()
    assert float((ours.float() - theirs.float()).abs().max()) <= bound * float(top) + 1e-30


def expert_of(seed: int, kind: str, dtype: torch.dtype) -> Expert:
    w1, w3 = (weight_of(seed + i, 64, 96, kind, dtype) for i in (0, 1))
    return Expert(w1, w3, weight_of(seed + 2, 96, 64, kind, dtype))


@EXAMPLES
@given(count=COUNTS, width=st.sampled_from([8, 33, 96, 500]), dtype=st.sampled_from(DTYPES))
def test_rms_norm_equals_reference(
    native: NativeOperators, count: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = draw(1, count, width, dtype=dtype), draw(2, width, dtype=dtype)
    close(native.rms_norm(x, weight, 1e-20), REFERENCE.rms_norm(x, weight, 1e-20))
    zeros = torch.zeros_like(x)
    assert torch.equal(native.rms_norm(zeros, weight, 1e-20), zeros)


@EXAMPLES
@given(count=COUNTS, heads=st.integers(1, 5), inverse=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_rotation_equals_reference_and_leaves_the_head_alone(
    native: NativeOperators, count: int, heads: int, inverse: bool, dtype: torch.dtype
) -> None:
    x, table = draw(1, count, heads, 48, dtype=dtype), draw(2, count, 8, 2)
    ours = native.rotate(x, table, inverse=inverse)
    close(ours, REFERENCE.rotate(x, table, inverse=inverse))
    assert torch.equal(ours[..., :32], x[..., :32])


@EXAMPLES
@given(count=COUNTS, copies=st.sampled_from([2, 4]), width=st.sampled_from([32, 100]),
       dtype=st.sampled_from(DTYPES), iters=st.sampled_from([1, 6, 20]))  # fmt: skip
def test_hyper_connections_equal_reference(
    native: NativeOperators, count: int, copies: int, width: int, dtype: torch.dtype, iters: int
) -> None:
    mixes_count = copies * (copies + 2)
    stream, y = draw(1, count, copies, width, dtype=dtype), draw(2, count, width, dtype=dtype)
    weights = HyperWeights(
        draw(3, mixes_count, copies * width) * (copies * width) ** -0.5, draw(4, mixes_count),
        draw(5, 3), iters, 1e-6, 1e-20,
    )  # fmt: skip
    norm = draw(6, width, dtype=dtype)

    def mixes(ops: NativeOperators | ReferenceOperators) -> Mixes:
        return ops.hc_mixes(
            stream, weights.fn, weights.base, weights.scale, iters=iters, eps=1e-6, norm_eps=1e-20
        )

    expected = mixes(REFERENCE)
    for ours, theirs in zip(mixes(native), expected, strict=True):
        close(ours, theirs, 3e-5)
    close(native.hc_collapse(stream, expected.pre), REFERENCE.hc_collapse(stream, expected.pre))
    close(native.hc_expand(y, stream, expected), REFERENCE.hc_expand(y, stream, expected))
    close(
        native.collapse_norm(stream, expected.pre, norm, 1e-20),
        REFERENCE.collapse_norm(stream, expected.pre, norm, 1e-20),
        1e-4,
    )
    ours_turn = native.hc_turn(y, stream, expected, weights, norm)
    theirs_turn = REFERENCE.hc_turn(y, stream, expected, weights, norm)
    close(ours_turn[0], theirs_turn[0])
    if dtype == torch.float32:
        close(ours_turn[1].comb, theirs_turn[1].comb, 1e-4)
        close(ours_turn[2], theirs_turn[2], 1e-4)


def test_sinkhorn_of_the_worked_example_ends_on_columns(native: NativeOperators) -> None:
    logits = torch.tensor([[2.0, 0, 0, 0], [0, 3, 0, 0], [1, 0, 0, -1], [0, 0, -2, 4]])
    base = torch.cat((torch.zeros(8), logits.flatten()))
    mixes = native.hc_mixes(
        torch.ones(1, 4, 8), torch.zeros(24, 32), base, torch.ones(3), iters=20, eps=1e-6,
        norm_eps=1e-20,
    )  # fmt: skip
    expected = torch.tensor(
        [[0.5774495, 0.0733216, 0.3102839, 0.0393979], [0.0411424, 0.7752939, 0.1633501, 0.0207412],
         [0.3481220, 0.1201549, 0.5084735, 0.0237515], [0.0332850, 0.0312286, 0.0178915, 0.9161085]]
    )  # fmt: skip
    assert torch.allclose(mixes.comb[0], expected, atol=1e-6)
    assert torch.allclose(mixes.pre, torch.full((1, 4), 0.500001), atol=1e-6)
    assert torch.allclose(mixes.post, torch.ones(1, 4), atol=1e-6)


@EXAMPLES
@given(groups=st.integers(0, 9), ratio=st.sampled_from([2, 4]), width=st.sampled_from([32, 70]))
def test_group_pooling_equals_reference(
    native: NativeOperators, groups: int, ratio: int, width: int
) -> None:
    kv, gate = draw(1, groups, ratio, width), 5 * draw(2, groups, ratio, width)
    ours = native.pool_groups(kv, gate)
    if groups:
        close(ours, REFERENCE.pool_groups(kv, gate))


@EXAMPLES
@given(count=COUNTS, scoring=st.sampled_from(["sqrtsoftplus", "sigmoid", "softmax"]),
       topk=st.integers(1, 4), seed=st.integers(0, 1000), dtype=st.sampled_from(DTYPES))  # fmt: skip
def test_router_chooses_the_same_experts(
    native: NativeOperators, count: int, scoring: str, topk: int, seed: int, dtype: torch.dtype
) -> None:
    x, gate = draw(seed, count, 96, dtype=dtype), draw(seed + 1, 6, 96, dtype=dtype) * 0.1
    bias = 0.1 * draw(seed + 2, 6)
    options = {"topk": topk, "scoring": scoring, "normalise": True, "scale": 1.5}
    ours = native.route(x, gate, bias, **options)
    theirs = REFERENCE.route(x, gate, bias, **options)
    assert torch.equal(ours.experts, theirs.experts)
    close(ours.weights, theirs.weights, 1e-5)


def test_router_ties_go_to_the_lowest_expert(native: NativeOperators) -> None:
    x, gate = torch.ones(2, 32), torch.zeros(5, 32)
    routing = native.route(
        x, gate, torch.zeros(5), topk=3, scoring="sigmoid", normalise=True, scale=1.0
    )
    assert routing.experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_router_stays_finite_at_extreme_logits(native: NativeOperators) -> None:
    gate = torch.tensor([[-100.0], [-60.0], [0.0], [60.0]])
    routing = native.route(
        torch.ones(1, 1),
        gate,
        torch.zeros(4),
        topk=4,
        scoring="sqrtsoftplus",
        normalise=True,
        scale=1.0,
    )
    assert torch.isfinite(routing.weights).all()
    assert float(routing.weights.sum()) == pytest.approx(1.0, abs=1e-6)
    assert routing.experts.tolist() == [[3, 2, 1, 0]]


@EXAMPLES
@given(count=COUNTS, kind=st.sampled_from(["plain", "fp8", "fp4"]), dtype=st.sampled_from(DTYPES),
       limit=st.sampled_from([0.0, 0.3, 10.0]))  # fmt: skip
def test_experts_equal_reference(
    native: NativeOperators, count: int, kind: str, dtype: torch.dtype, limit: float
) -> None:
    experts = [expert_of(10 * e, kind, dtype) for e in range(5)]
    shared = expert_of(99, kind, dtype)
    x = draw(1, count, 96, dtype=dtype)
    ids = torch.stack(
        [torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(count)]
    )
    routing = Routing(ids, draw(2, count, 2).abs())
    ours = native.moe(x, routing, experts, shared, limit=limit)
    theirs = REFERENCE.moe(x, routing, experts, shared, limit=limit)
    # One E4M3 step of a requantised hidden value may flip: 1/16 of it, in one of 64 inputs.
    close(ours, theirs, 3e-6 if kind == "plain" else 2e-3)


@EXAMPLES
@given(count=COUNTS, kind=st.sampled_from(["plain", "fp8"]), dtype=st.sampled_from(DTYPES))
def test_chained_projections_equal_their_parts(
    native: NativeOperators, count: int, kind: str, dtype: torch.dtype
) -> None:
    weight, norm, table = (
        weight_of(1, 96, 64, kind, dtype),
        draw(2, 96, dtype=dtype),
        draw(3, count, 8, 2),
    )
    x = draw(4, count, 64, dtype=dtype)
    parts = native.rotate(native.rms_norm(native.linear(x, weight), norm, 1e-20), table)
    assert torch.equal(native.project(x, weight, norm=norm, eps=1e-20, cos_sin=table), parts)
    apart = native.rotate(native.linear(x, weight).unflatten(-1, (3, -1)), table)
    assert torch.equal(native.project(x, weight, cos_sin=table, vectors=3), apart)
    grouped, last = weight_of(5, 64, 96, kind, dtype), weight_of(6, 96, 64, kind, dtype)
    o = draw(7, count, 4, 48, dtype=dtype)
    back = native.rotate(o, table, inverse=True).flatten(1).unflatten(1, (2, -1))
    expected = native.linear(native.grouped_linear(back, grouped), last)
    assert torch.equal(native.project_output(o, table, grouped, last, groups=2), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "fp8", "fp4"])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(
    native: NativeOperators, dtype: torch.dtype, kind: str
) -> None:
    weight = weight_of(1, 96, 64, kind, dtype)
    experts, shared = [expert_of(10 * e, kind, dtype) for e in range(3)], expert_of(99, kind, dtype)
    x, wide = draw(2, 40, 64, dtype=dtype), draw(3, 40, 96, dtype=dtype)
    ids = torch.arange(80).view(40, 2) % 3
    routes = Routing(ids, draw(4, 40, 2).abs())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        linear = native.linear(x, weight)
        moe = native.moe(wide, routes, experts, shared, limit=1.0)
        torch.set_num_threads(1)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(0, 33)):
            assert torch.equal(native.linear(x[rows], weight), linear[rows])
            part = Routing(ids[rows], routes.weights[rows])
            assert torch.equal(native.moe(wide[rows], part, experts, shared, limit=1.0), moe[rows])
    finally:
        torch.set_num_threads(before)
