"""Routing: extreme logits, biases that steer only the choice, ties, clamps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cedar.kernels.operators import Expert, Operators, Routing, Weight


def route(ops: Operators, logits: Tensor, bias: Tensor, **options: object) -> Routing:
    """Route rows whose router logits are given: an identity gate."""
    settings = {"topk": 2, "scoring": "sqrtsoftplus", "normalise": True, "scale": 1.0} | options
    return ops.route(logits, torch.eye(logits.shape[1]), bias, **settings)  # type: ignore[arg-type]


def test_extreme_logits_give_finite_weights_in_order(ops: Operators) -> None:
    """-100, -60, 0, 60: sqrt(softplus) is tiny but not zero (regression class: NaN or equal weights
    for very negative logits)."""
    logits = torch.tensor([[-100.0, -60.0, 0.0, 60.0]])
    routing = route(ops, logits, torch.zeros(4), topk=4)
    assert routing.experts.tolist() == [[3, 2, 1, 0]]
    weights = routing.weights[0]
    assert torch.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1.0, abs=1e-6)
    assert (weights[:-1] > weights[1:]).all()
    expected = torch.tensor([60**0.5, 0.6931472**0.5])
    assert torch.allclose(weights[:2], expected / expected.sum(), rtol=1e-5)


@pytest.mark.parametrize("low", [-60.0, -100.0, -1e4])
def test_rows_of_only_very_negative_logits_stay_finite(ops: Operators, low: float) -> None:
    routing = route(ops, torch.full((1, 4), low), torch.zeros(4))
    assert torch.isfinite(routing.weights).all()
    assert routing.experts.tolist() == [[0, 1]]


def test_the_bias_steers_the_choice_but_not_the_weights(ops: Operators) -> None:
    """32 experts, random bias: chosen by transformed score + bias, weighed by the score alone, with
    1e-20 in the sum, times the scale (regression class: selection on the raw logit)."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 32, generator=generator)
    bias = torch.randn(32, generator=generator)
    routing = route(ops, logits, bias, topk=6, scale=1.5)
    scores = F.softplus(logits.double()).sqrt()
    chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :6]
    assert torch.equal(routing.experts, chosen)
    wrong = torch.sort(logits + bias, dim=-1, descending=True).indices[:, :6]
    assert not torch.equal(chosen, wrong), "the case must tell the two rules apart"
    weights = scores.gather(1, chosen)
    weights = 1.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    assert torch.allclose(routing.weights.double(), weights, atol=1e-6)


def test_each_row_may_have_its_own_bias(ops: Operators) -> None:
    logits = torch.zeros(2, 4)
    bias = torch.tensor([[0.0, 1, 2, 3], [3.0, 2, 1, 0]])
    routing = route(ops, logits, bias)
    assert routing.experts.tolist() == [[3, 2], [0, 1]]
    assert torch.allclose(routing.weights, torch.full((2, 2), 0.5))


@given(ties=st.lists(st.integers(0, 3), min_size=8, max_size=8), topk=st.integers(1, 8))
def test_equal_scores_go_to_the_lowest_expert(ops: Operators, ties: list[int], topk: int) -> None:
    logits = torch.tensor([ties], dtype=torch.float32)
    routing = route(ops, logits, torch.zeros(8), topk=topk)
    expected = sorted(range(8), key=lambda e: (-ties[e], e))[:topk]
    assert routing.experts.tolist() == [expected]


def test_one_expert_per_token_is_not_normalised(ops: Operators) -> None:
    logits = torch.tensor([[0.0, 2.0]])
    routing = route(ops, logits, torch.zeros(2), topk=1)
    assert routing.weights[0, 0] == pytest.approx(
        float(F.softplus(torch.tensor(2.0)).sqrt()), rel=1e-6
    )


def unit_expert(width: int) -> Expert:
    eye = Weight(torch.eye(width))
    return Expert(w1=eye, w3=eye, w2=eye)


def test_the_gate_is_clamped_from_above_only_and_before_the_nonlinearity(ops: Operators) -> None:
    """up to +-limit, gate to +limit; a very negative gate stays what it is."""
    x = torch.tensor([[20.0, -20.0, 3.0] + [0.0] * 29])
    nobody = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))
    expert = unit_expert(32)
    out = ops.moe(x, nobody, [expert], expert, limit=10.0)[0]
    gate, up = torch.tensor([10.0, -20.0, 3.0]), torch.tensor([10.0, -10.0, 3.0])
    assert torch.allclose(out[:3], F.silu(gate) * up, rtol=1e-5, atol=1e-12)
    free = ops.moe(x, nobody, [expert], expert, limit=0.0)[0]
    assert torch.allclose(free[:2], F.silu(x[0, :2]) * x[0, :2], rtol=1e-5, atol=1e-12)
