"""Experts and router of the native library: the order of roundings and sums, and large groups.

`test_native_layers.py` holds them against the reference operators on small calls; here are the rules of
specification 4.10 one at a time, and calls large enough to be cut into pieces.
"""

from __future__ import annotations

import pytest
import torch
from native_calls import draw, library_or_skip, same_bits, weight_of
from torch import Tensor

from cedar.errors import UsageError
from cedar.kernels.native.operators import NativeOperators
from cedar.kernels.operators import Expert, Routing, Weight
from cedar.kernels.reference import ReferenceOperators

library_or_skip()
REFERENCE = ReferenceOperators()


def expert_of(seed: int, width: int, inner: int, kind: str) -> Expert:
    w1, w3 = (weight_of(3 * seed + i, inner, width, kind) for i in (0, 1))
    return Expert(w1, w3, weight_of(3 * seed + 2, width, inner, kind))


def gain(value: float) -> Expert:
    """An expert of one hidden channel: silu(x0) * x0 * value in output 0."""
    one = torch.zeros(32, 32)
    one[0, 0] = 1.0
    return Expert(Weight(one), Weight(one.clone()), Weight(one * value))


def test_outputs_are_added_in_ascending_expert_id_then_the_shared_one(
    native: NativeOperators,
) -> None:
    # In float32 (big + small) - big loses the small one, (big - big) + small keeps it.
    big = 2.0**30
    experts = [gain(big), gain(3.0), gain(-big)]
    x = torch.zeros(1, 32)
    x[0, 0] = 20.0
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        routing = Routing(torch.tensor([order]), torch.ones(1, 3))
        out = native.moe(x, routing, experts, gain(5.0), limit=0.0)
        term = REFERENCE.moe(x, Routing(torch.tensor([[1]]), torch.ones(1, 1)), experts, gain(0.0),
                             limit=0.0)  # fmt: skip
        assert float(out[0, 0]) == pytest.approx(float(term[0, 0]) / 3 * 5, rel=1e-5)


def test_the_routing_weight_enters_before_the_hidden_value_is_rounded(
    native: NativeOperators,
) -> None:
    # hidden = 1.5 * weight. Rounded after the product to bfloat16: weight 1 + 2^-8 gives 1.5 + 2^-7
    # (a tie, to even); rounding 1.5 first and multiplying later would keep 1.5 * (1 + 2^-8).
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    expert = Expert(*(Weight(w.values.bfloat16()) for w in gain(1.0)))
    nothing = Expert(*(Weight(w.values.bfloat16()) for w in gain(0.0)))
    silu = torch.nn.functional.silu(torch.ones(1))
    for weight in (1 + 2.0**-8, 1 + 2.0**-7, 0.3):
        routing = Routing(torch.tensor([[0]]), torch.full((1, 1), weight))
        out = native.moe(x, routing, [expert], nothing, limit=0.0)
        assert float(out[0, 0]) == float((silu * weight).bfloat16())


def test_the_up_side_is_clamped_both_ways_and_the_gate_from_above(native: NativeOperators) -> None:
    def with_up(sign: float) -> Expert:
        one = torch.zeros(32, 32)
        one[0, 0] = 1.0
        return Expert(Weight(one), Weight(one * sign), Weight(one))

    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0] = 50.0, -50.0
    nothing = Expert(*(Weight(torch.zeros(32, 32)) for _ in range(3)))
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    up = native.moe(x, routing, [with_up(1.0)], nothing, limit=4.0)[:, 0]
    down = native.moe(x, routing, [with_up(-1.0)], nothing, limit=4.0)[:, 0]
    silu = torch.nn.functional.silu(torch.tensor([4.0, -50.0]))
    assert torch.allclose(up, silu * torch.tensor([4.0, -4.0]), rtol=1e-5, atol=1e-30)
    assert torch.allclose(down, silu * torch.tensor([-4.0, 4.0]), rtol=1e-5, atol=1e-30)
    free = native.moe(x, routing, [with_up(1.0)], nothing, limit=0.0)[0, 0]
    assert float(free) == pytest.approx(2500.0)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp4"])
def test_groups_larger_than_a_piece_equal_their_rows(native: NativeOperators, kind: str) -> None:
    # 700 rows on three experts, one of them very popular: several pieces of 256 rows, one empty expert.
    experts = [expert_of(e, 64, 96, kind) for e in range(4)]
    shared = expert_of(9, 64, 96, "bfloat16")
    x = draw(1, 700, 64).bfloat16()
    ids = torch.zeros(700, 2, dtype=torch.int64)
    ids[:, 1] = 1
    ids[::50, 1] = 3
    weights = draw(2, 700, 2).abs()
    whole = native.moe(x, Routing(ids, weights), experts, shared, limit=10.0)
    for rows in (slice(0, 1), slice(50, 51), slice(100, 400), slice(699, 700)):
        part = native.moe(x[rows], Routing(ids[rows], weights[rows]), experts, shared, limit=10.0)
        assert same_bits(part, whole[rows])
    expected = REFERENCE.moe(x, Routing(ids, weights), experts, shared, limit=10.0).float()
    difference = (whole.float() - expected).abs()
    # One E4M3 step of a requantised hidden value may flip; most rows are equal up to a rounding.
    assert difference.max() <= 2e-2 * expected.abs().max()
    assert difference.median() <= 2.0**-9 * expected.abs().max()


def test_routed_and_shared_experts_may_have_different_weights(native: NativeOperators) -> None:
    experts, shared = [expert_of(e, 64, 32, "fp4") for e in range(3)], expert_of(9, 64, 32, "fp8")
    for count in (1, 20):
        x = draw(1, count, 64).bfloat16()
        routing = Routing(torch.arange(2 * count).view(count, 2) % 3, draw(2, count, 2).abs())
        ours = native.moe(x, routing, experts, shared, limit=10.0).float()
        expected = REFERENCE.moe(x, routing, experts, shared, limit=10.0).float()
        assert (ours - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize(("case", "limit"), [("lim1", 1.0), ("lim10", 10.0), ("nolimit", 0.0)])
def test_recorded_experts(
    native: NativeOperators, kernel_vectors: dict[str, Tensor], case: str, limit: float
) -> None:
    for kind in ("bf16", "fp8", "fp4") if case == "lim1" else ("bf16",):
        name = f"expert.{kind}_{case}"
        x, route = kernel_vectors[f"{name}.x"], kernel_vectors[f"{name}.route_weight"]
        scales = [kernel_vectors.get(f"{name}.{w}_scale") for w in ("w1", "w3", "w2")]
        values = [kernel_vectors[f"{name}.{w}"] for w in ("w1", "w3", "w2")]
        expert = Expert(*(Weight(v, s) for v, s in zip(values, scales, strict=True)))
        nothing = Expert(*(Weight(torch.zeros(v.shape[0], 96 if i < 2 else 64).bfloat16())
                           for i, v in enumerate(values)))  # fmt: skip
        ids = torch.zeros(len(x), 1, dtype=torch.int64)
        for weights, tensor in ((torch.ones_like(route), "out"), (route, "out_weighted")):
            expected = kernel_vectors[f"{name}.{tensor}"].float()
            ours = native.moe(x, Routing(ids, weights), [expert], nothing, limit=limit).float()
            assert (ours - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("case", ["sqrtsoftplus", "sigmoid", "softmax_nonorm", "top1"])
def test_recorded_routing(
    native: NativeOperators, kernel_vectors: dict[str, Tensor], case: str
) -> None:
    get = {n: kernel_vectors[f"gate.{case}.{n}"] for n in ("x", "weight", "bias", "bias_vl",
                                                           "image_mask", "params")}  # fmt: skip
    topk, normalise, scale = get["params"].tolist()
    scoring = case.split("_")[0] if case != "top1" else "sqrtsoftplus"
    mixed = torch.where(get["image_mask"][:, None], get["bias_vl"], get["bias"])
    for bias, prefix in ((get["bias"], "text"), (mixed, "mixed")):
        routing = native.route(
            get["x"], get["weight"], bias, topk=int(topk), scoring=scoring,
            normalise=bool(normalise), scale=scale,
        )  # fmt: skip
        assert torch.equal(routing.experts, kernel_vectors[f"gate.{case}.{prefix}_experts"])
        expected = kernel_vectors[f"gate.{case}.{prefix}_weights"]
        assert torch.allclose(routing.weights, expected, atol=2e-6, rtol=1e-5)


def test_routing_does_not_see_the_batch(native: NativeOperators) -> None:
    x, gate, bias = draw(1, 50, 96).bfloat16(), draw(2, 12, 96).bfloat16(), 0.1 * draw(3, 12)

    def route(rows: slice) -> Routing:
        return native.route(x[rows], gate, bias, topk=3, scoring="sqrtsoftplus", normalise=True,
                            scale=1.5)  # fmt: skip

    whole = route(slice(0, 50))
    for rows in (slice(0, 1), slice(13, 14), slice(5, 40)):
        part = route(rows)
        assert torch.equal(part.experts, whole.experts[rows])
        assert same_bits(part.weights, whole.weights[rows])


def test_experts_that_do_not_exist_are_refused(native: NativeOperators) -> None:
    experts, shared = [expert_of(0, 32, 32, "bfloat16")], expert_of(1, 32, 32, "bfloat16")
    x = draw(1, 1, 32).bfloat16()
    for bad in (-1, 1):
        with pytest.raises(UsageError):
            native.moe(x, Routing(torch.tensor([[bad]]), torch.ones(1, 1)), experts, shared,
                       limit=0.0)  # fmt: skip
