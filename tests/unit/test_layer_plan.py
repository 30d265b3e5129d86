"""The layer plan: the released table, the article's table, variants, and what blocks CED."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cedar.config.layer_plan import LayerPlan, LayerSpec
from cedar.config.presets import preset, preset_names


def columns(plan: LayerPlan, name: str) -> list[object]:
    return [getattr(spec, name) for spec in plan.layers]


def test_released_plan_is_the_printed_table() -> None:
    """Section 2.2 of the architecture's specification, row by row."""
    plan = preset("v4.1-flash").plan
    assert len(plan) == 40
    assert plan.num_encoder_layers == 20
    assert columns(plan, "side") == ["encoder"] * 20 + ["decoder"] * 20
    assert columns(plan, "compress_ratio") == [0] * 2 + [2] * 18 + [1] * 20
    roles = ["window"] * 2 + (["full"] + ["reuse"] * 5) * 3
    roles += ["full"] + ["reuse"] * 3 + (["reindex"] + ["reuse"] * 3) * 4
    assert columns(plan, "role") == roles
    owners = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert columns(plan, "kv_owner") == owners
    topk = owners[:20] + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert columns(plan, "topk_owner") == topk
    candidates = {20: "source", 24: "consumer", 28: "consumer", 32: "consumer", 36: "consumer"}
    assert columns(plan, "candidate") == [candidates.get(i, "none") for i in range(40)]
    assert [spec.layer_id for spec in plan.layers if spec.has_engram] == [1, 14]
    assert set(columns(plan, "kv_adapter")) == {"none"}
    assert [spec.layer_id for spec in plan.boundary_owners] == [20]
    assert plan.ced_blocker is None
    assert (plan.sliding_window, plan.index_topk) == (128, 512)
    assert plan.candidate_topk_blocks * plan.candidate_block_size == 16384


def test_released_counts_of_roles() -> None:
    roles = columns(preset("v4.1-flash").plan, "role")
    counts = {role: roles.count(role) for role in ("window", "full", "reindex", "reuse")}
    assert counts == {"window": 2, "full": 4, "reindex": 4, "reuse": 30}


@pytest.mark.parametrize("name", ["article", "article-thin"])
def test_article_plan_is_ten_groups_of_four_with_own_boundary_projections(name: str) -> None:
    plan = preset(name).plan
    assert columns(plan, "role") == ["full", "reuse", "reindex", "reuse"] * 10
    assert plan.num_encoder_layers == 20
    assert set(columns(plan, "compress_ratio")) == {4}
    assert columns(plan, "kv_owner") == [i // 4 * 4 for i in range(40)]
    assert columns(plan, "topk_owner") == [i // 2 * 2 for i in range(40)]
    assert [spec.layer_id for spec in plan.boundary_owners] == [20, 24, 28, 32, 36]
    assert all(spec.kv_input == "self" for spec in plan.encoder)
    assert plan.ced_blocker is None


def test_tiny_presets_hold_every_role_and_the_released_plan() -> None:
    assert set(columns(preset("tiny").plan, "role")) == {"window", "full", "reindex", "reuse"}
    released, tiny = preset("v4.1-flash").plan, preset("tiny-40").plan
    for name in (
        "side",
        "role",
        "compress_ratio",
        "kv_owner",
        "topk_owner",
        "kv_input",
        "candidate",
    ):
        assert columns(tiny, name) == columns(released, name)
    assert columns(preset("tiny-article").plan, "role") == ["full", "reuse", "reindex", "reuse"] * 2


@pytest.mark.parametrize("name", preset_names())
def test_sharing_off_makes_every_compressed_layer_an_owner(name: str) -> None:
    config = preset(name)
    plan = config.variant(ced=True, csa2=False).plan
    for spec, shared in zip(plan.layers, config.plan.layers, strict=True):
        assert spec.role == ("window" if shared.role == "window" else "full")
        assert spec.compress_ratio == shared.compress_ratio
        assert spec.side == shared.side
        assert spec.candidate == "none"
        if spec.role == "full":
            assert spec.kv_owner == spec.topk_owner == spec.layer_id
            assert spec.kv_input == ("boundary" if spec.side == "decoder" else "self")
    assert plan.ced_blocker is None


@pytest.mark.parametrize("csa2", [False, True])
@pytest.mark.parametrize("name", preset_names())
def test_ced_off_makes_decoder_owners_read_their_own_input(name: str, csa2: bool) -> None:
    config = preset(name)
    plan = config.variant(ced=False, csa2=csa2).plan
    assert plan.boundary_owners == ()
    owners = [spec.layer_id for spec in plan.decoder if spec.role == "full"]
    assert plan.ced_blocker == f"decoder layer {owners[0]} computes its KV rows from its own input"
    assert plan.num_encoder_layers == config.plan.num_encoder_layers


@pytest.mark.parametrize("name", preset_names())
def test_both_switches_on_is_the_config_itself(name: str) -> None:
    config = preset(name)
    assert config.variant(ced=True, csa2=True).plan == config.plan


def test_the_four_flows_differ_in_nothing_but_plan_fields() -> None:
    config = preset("tiny")
    plan_fields = {
        "num_encoder_layers", "decoder_kv_input", "kv_source_layer_ids", "index_source_layer_ids",
        "candidate_source_layer_id", "kv_adapter", "kv_adapter_rank",
    }  # fmt: skip
    for ced in (False, True):
        for csa2 in (False, True):
            variant = config.variant(ced=ced, csa2=csa2)
            changed = {
                name for name in config.__dataclass_fields__ if name not in ("source", "plan")
                and getattr(config, name) != getattr(variant, name)
            }  # fmt: skip
            assert changed <= plan_fields


def test_the_cut_defaults_to_the_last_kv_source_and_can_be_moved() -> None:
    config = preset("tiny")
    assert config.num_encoder_layers is None
    assert config.plan.num_encoder_layers == 4
    moved = replace(config, num_encoder_layers=3).plan
    assert [spec.layer_id for spec in moved.boundary_owners] == [3, 4]
    assert (
        replace(config, num_encoder_layers=8).plan.ced_blocker == "the plan has no decoder layers"
    )


def test_only_borrowing_layers_have_an_adapter() -> None:
    plan = replace(preset("tiny"), kv_adapter="diag").plan
    for spec in plan.layers:
        assert spec.kv_adapter == ("diag" if spec.role in ("reindex", "reuse") else "none")
    lowrank = replace(preset("tiny"), kv_adapter="lowrank", kv_adapter_rank=2).plan
    assert {s.kv_adapter for s in lowrank.layers if s.role == "reuse"} == {"lowrank"}


def test_ratio_lcm_is_where_no_group_is_open() -> None:
    assert preset("v4.1-flash").plan.ratio_lcm == 2
    assert preset("article").plan.ratio_lcm == 4
    ratios = (0, 3, 3, 2, 1, 1, 1, 1)
    assert replace(preset("tiny"), compress_ratios=ratios).plan.ratio_lcm == 6


def test_the_printed_table_has_a_line_per_layer() -> None:
    lines = preset("tiny").plan.table().splitlines()
    assert lines[0].split() == ["layer", "side", "role", "ratio", "kv", "topk", "notes"]
    assert lines[1].split() == ["0", "encoder", "window", "0", "-", "-"]
    assert lines[5].split() == [
        "4", "decoder", "full", "1", "4", "4", "kv_input=boundary,", "candidate", "source",
    ]  # fmt: skip
    assert lines[7].split() == ["6", "decoder", "reindex", "1", "4", "6", "candidate", "consumer"]
    assert len(lines) == 9


def test_plans_and_specs_are_frozen() -> None:
    plan = preset("tiny").plan
    with pytest.raises(AttributeError):
        plan.index_topk = 5  # type: ignore[misc]
    spec: LayerSpec = plan[0]
    with pytest.raises(AttributeError):
        spec.role = "full"  # type: ignore[misc]
