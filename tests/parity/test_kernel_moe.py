"""Recorded routing and experts."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_bf16, assert_within
from torch import Tensor

from cedar.kernels.operators import Expert, Operators, Routing, Weight

Recorded = dict[str, Tensor]
GATES = [
    ("sqrtsoftplus", "sqrtsoftplus"),
    ("sigmoid", "sigmoid"),
    ("softmax_nonorm", "softmax"),
    ("top1", "sqrtsoftplus"),
]


@pytest.mark.parametrize(("case", "scoring"), GATES)
def test_routing_matches_the_recorded_one(
    ops: Operators, kernel_vectors: Recorded, case: str, scoring: str
) -> None:
    """With one bias for all rows, and with the image rows' own bias."""
    t = {n.rsplit(".", 1)[1]: v for n, v in kernel_vectors.items() if n.startswith(f"gate.{case}.")}
    topk, normalise, scale = t["params"].tolist()
    mixed = torch.where(t["image_mask"].unsqueeze(-1), t["bias_vl"], t["bias"])
    for bias, name in ((t["bias"], "text"), (mixed, "mixed")):
        routing = ops.route(
            t["x"], t["weight"], bias, topk=int(topk), scoring=scoring, normalise=bool(normalise),
            scale=scale,
        )  # fmt: skip
        assert torch.equal(routing.experts, t[f"{name}_experts"])
        assert_within(routing.weights, t[f"{name}_weights"], 1e-6)


CASES = ["bf16_lim1", "bf16_lim10", "bf16_nolimit", "fp8_lim1", "fp4_lim1"]


def expert_case(recorded: Recorded, case: str) -> tuple[dict[str, Tensor], Expert, float]:
    t = {n.rsplit(".", 1)[1]: v for n, v in recorded.items() if n.startswith(f"expert.{case}.")}
    weights = (Weight(t[name], t.get(f"{name}_scale")) for name in ("w1", "w3", "w2"))
    limit = case.split("_")[1]
    return t, Expert(*weights), 0.0 if limit == "nolimit" else float(limit.removeprefix("lim"))


def silent(expert: Expert) -> Expert:
    """The same expert with every weight zero."""
    return Expert(*(Weight(torch.zeros_like(w.values), w.scale) for w in expert))


@pytest.mark.parametrize("case", CASES)
def test_shared_expert_matches_the_recorded_one(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    t, expert, limit = expert_case(kernel_vectors, case)
    nobody = Routing(torch.zeros(len(t["x"]), 1, dtype=torch.int64), torch.zeros(len(t["x"]), 1))
    out = ops.moe(t["x"], nobody, [silent(expert)], expert, limit=limit)
    assert_bf16(out, t["out"], ulps=2)


@pytest.mark.parametrize("case", CASES)
def test_routed_expert_is_weighted_before_its_down_projection(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    t, expert, limit = expert_case(kernel_vectors, case)
    routing = Routing(torch.zeros(len(t["x"]), 1, dtype=torch.int64), t["route_weight"])
    out = ops.moe(t["x"], routing, [expert], silent(expert), limit=limit)
    assert_bf16(out, t["out_weighted"], ulps=2)


def test_experts_of_each_row_and_the_shared_one_add_up(
    ops: Operators, kernel_vectors: Recorded
) -> None:
    """Each row gets exactly its own experts; one that nobody chose adds nothing."""
    t, expert, limit = expert_case(kernel_vectors, "bf16_lim10")
    x = t["x"].float()
    doubled = Expert(expert.w1, expert.w3, Weight(2 * expert.w2.values))
    poison = Expert(*(Weight(torch.full_like(w.values, float("nan"))) for w in expert))
    rows = torch.arange(len(x))
    routing = Routing(
        torch.stack((rows % 2, 1 - rows % 2), -1), torch.tensor([0.75, 0.25]).expand(len(x), 2)
    )
    nothing = silent(expert)
    single = [
        ops.moe(x, Routing(torch.zeros(len(x), 1, dtype=torch.int64), torch.full((len(x), 1), w)),
                [expert], nothing, limit=limit)
        for w in (0.75, 0.25)
    ]  # fmt: skip
    shared = ops.moe(x, Routing(routing.experts[:, :1] * 0, torch.zeros(len(x), 1)), [nothing],
                     expert, limit=limit)  # fmt: skip
    even = (rows % 2 == 0).unsqueeze(-1)
    expected = shared + torch.where(even, single[0] + 2 * single[1], 2 * single[0] + single[1])
    out = ops.moe(x, routing, [expert, doubled, poison], expert, limit=limit)
    assert_within(out, expected, 1e-5 * float(expected.abs().max()))
