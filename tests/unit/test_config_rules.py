"""One clear refusal per rule of a config: the message names what, the value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.errors import ConfigError

Document = dict[str, Any]


def refused(message: str, base: str = "tiny", **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(preset(base), **changes)


def test_the_base_of_these_tests_is_valid() -> None:
    assert preset("tiny").compress_ratios == (0, 2, 2, 2, 1, 1, 1, 1)


# Shapes.

SIZES = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
    "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_at_least_one(name: str) -> None:
    refused(f"{name}=0 must be at least 1", **{name: 0})


def test_heads_divide_into_output_groups() -> None:
    refused("num_attention_heads=2 is not a multiple of o_groups=3", o_groups=3)


def test_head_widths_are_multiples_of_a_scale_group() -> None:
    refused("head_dim=48 and index_head_dim=32 must be multiples of 32", head_dim=48)
    refused("head_dim=32 and index_head_dim=40 must be multiples of 32", index_head_dim=40)


@pytest.mark.parametrize("width", [0, 7, 34])
def test_the_rotary_part_is_even_and_inside_the_heads(width: int) -> None:
    refused(
        f"qk_rope_head_dim={width} must be even and at most head_dim=32", qk_rope_head_dim=width
    )


def test_experts_per_token_exist() -> None:
    refused("num_experts_per_tok=5 exceeds n_routed_experts=4", num_experts_per_tok=5)


def test_there_is_one_shared_expert() -> None:
    refused("n_shared_experts=2 is not supported; allowed: 1", n_shared_experts=2)


def test_scoring_is_one_of_three() -> None:
    refused("scoring_func='relu' is not supported; allowed: sqrtsoftplus", scoring_func="relu")


@pytest.mark.parametrize("name", ["rope_theta", "compress_rope_theta", "rope_factor"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_rotary_numbers_are_positive_and_finite(name: str, value: float) -> None:
    refused(f"{name}={value} must be finite and above 0", **{name: value})


@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor"]
)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_other_numbers_are_finite_and_not_negative(name: str, value: float) -> None:
    refused(f"{name}={value} must be finite and at least 0", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "width"),
    [
        ("q_lora_rank", 40, "q_lora_rank=40"),
        ("hidden_size", 48, "hidden_size=48"),
        ("o_lora_rank", 24, "o_groups * o_lora_rank=48"),
    ],
)
def test_quantised_input_widths_are_multiples_of_32(name: str, value: int, width: str) -> None:
    replace(preset("tiny"), **{name: value})  # fine in bfloat16
    message = f"{width} must be a multiple of 32".replace("*", r"\*")
    refused(message, dense_dtype="fp8", **{name: value})


def test_quantised_expert_widths_are_multiples_of_32() -> None:
    refused(
        "moe_intermediate_size=48 must be a multiple of 32",
        expert_dtype="fp4", moe_intermediate_size=48,
    )  # fmt: skip


# cedar's own plan fields.


def test_own_plan_fields_are_checked() -> None:
    refused(r"decoder_kv_input='x'; allowed: boundary \(CED\), self", decoder_kv_input="x")
    refused("kv_adapter='dense'; allowed: none, diag, lowrank", kv_adapter="dense")
    refused("kv_adapter='lowrank' needs kv_adapter_rank >= 1", kv_adapter="lowrank")


@pytest.mark.parametrize("cut", [-1, 0, 9])
def test_the_cut_lies_inside_the_model(cut: int) -> None:
    refused(f"num_encoder_layers={cut} is out of range: allowed 1..8", num_encoder_layers=cut)


# The layer plan, rules 1 to 4 and 7 of the specification's section 1.5.


def test_there_is_one_ratio_per_layer_and_draft() -> None:
    refused("compress_ratios has 7 entries; it needs 8", compress_ratios=(0, 2, 2, 2, 1, 1, 1))


@pytest.mark.parametrize("ratio", [-1])
def test_ratios_are_not_negative(ratio: int) -> None:
    ratios = (0, ratio, 2, 2, 1, 1, 1, 1)
    refused(rf"compress_ratios\[1\]={ratio} is not a ratio", compress_ratios=ratios)


def test_draft_layers_have_ratio_zero() -> None:
    flash = preset("v4.1-flash")
    message = r"compress_ratios ends with \[0, 1, 0\] for the draft layers; .* must be 0"
    refused(message, "v4.1-flash", compress_ratios=(*flash.compress_ratios[:40], 0, 1, 0))


@pytest.mark.parametrize(
    "name", ["kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"]
)
def test_layer_lists_are_ascending_and_inside_the_model(name: str) -> None:
    extra: dict[str, Any] = {}
    if name == "engram_layer_ids":
        extra = dict(
            engram_num_embeddings=(1, 1, 1), engram_max_ngram_size=2, engram_vocab_size=2,
            engram_n_heads=1, engram_head_dim=32, engram_pad_token_id=0,
            engram_compressed_vocab_size=4,
        )  # fmt: skip
    refused(f"{name} names layer 8; allowed 0..7", **{name: (1, 3, 8)}, **extra)
    refused(f"{name} names layer -1; allowed 0..7", **{name: (-1, 1, 3)}, **extra)
    refused(rf"{name}=\[3, 1, 4\] must be ascending without repeats", **{name: (3, 1, 4)}, **extra)
    refused(rf"{name}=\[1, 3, 3\] must be ascending without repeats", **{name: (1, 3, 3)}, **extra)


def test_every_kv_source_is_an_index_source() -> None:
    refused(
        r"kv_source_layer_ids \[3\] are missing from index_source_layer_ids \[1, 4, 6\]",
        index_source_layer_ids=(1, 4, 6),
    )


def test_a_source_has_a_ratio() -> None:
    refused(
        r"layer 0 is a source but compress_ratios\[0\]=0 \(window only\)",
        index_source_layer_ids=(0, 1, 3, 4, 6),
    )


def test_a_compressed_layer_has_a_source_at_or_below_it() -> None:
    refused(
        "layer 1 has compress ratio 2 but no KV source at or below it",
        kv_source_layer_ids=(3, 4), index_source_layer_ids=(3, 4, 6),
    )  # fmt: skip


def test_a_layer_and_its_source_have_one_ratio() -> None:
    refused(
        "layer 4 has compress ratio 1 but its KV source 3 has 2: they must be equal",
        kv_source_layer_ids=(1, 3), candidate_source_layer_id=-1,
    )  # fmt: skip


def test_the_candidate_source_is_an_index_source() -> None:
    refused(
        r"candidate_source_layer_id=5 is not in index_source_layer_ids \[1, 3, 4, 6\]; .* or -1",
        candidate_source_layer_id=5,
    )


def test_later_index_sources_share_the_rows_of_the_candidate_source() -> None:
    refused(
        "index source 4 reads rows of layer 4, but the candidate pool of layer 3 is over rows of "
        "layer 3",
        candidate_source_layer_id=3,
    )


@pytest.mark.parametrize(("blocks", "size"), [(1, 2), (0, 4), (4, 0)])
def test_the_candidate_pool_holds_a_whole_selection(blocks: int, size: int) -> None:
    """A smaller pool would let masked positions into the selection."""
    refused(
        f"candidate pool {blocks} blocks x {size} = {blocks * size} positions is smaller than "
        "index_topk=4",
        candidate_topk_blocks=blocks, candidate_block_size=size,
    )  # fmt: skip


def test_an_engram_above_the_cut_rules_out_bounded_replay_and_says_so(
    model_directory: Callable[[str], Path],
) -> None:
    document = json.loads((model_directory("m3") / "config.json").read_text())
    document["text_config"]["engram_layer_ids"] = [1, 5]
    plan = ModelConfig.from_dict(document).plan
    assert plan.ced_blocker == "layer 5 has an Engram at or above the encoder/decoder cut 4"
    assert all(spec.kv_input == "self" for spec in plan.kv_owners)
