"""Totals of the released checkpoint, counted from the weight schema: tensors, bytes, parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors import safe_open

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.config.weight_schema import TensorSpec, layer_schema, weight_schema


@cache
def released() -> tuple[TensorSpec, ...]:
    return tuple(weight_schema(preset("v4.1-flash")))


def parameters(*parts: str) -> int:
    return sum(spec.parameters for spec in released() if spec.part in parts)


def test_tensors_and_payload_bytes_are_those_of_the_released_index() -> None:
    assert len(released()) == 96_085
    assert len({spec.name for spec in released()}) == 96_085
    assert sum(spec.nbytes for spec in released()) == 510_286_023_000


def test_tensors_of_each_dtype() -> None:
    assert Counter(spec.tag for spec in released()) == {
        "BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232,
    }  # fmt: skip


def test_tensors_of_each_layer() -> None:
    counts = Counter(".".join(spec.name.split(".")[:2]) for spec in released())
    special = {1: 2340, 2: 2342, 8: 2342, 14: 2348, 20: 2341} | dict.fromkeys(
        (24, 28, 32, 36), 2337
    )
    for layer in range(40):
        assert counts[f"layers.{layer}"] == special.get(layer, 2334)
    assert [counts[f"mtp.{draft}"] for draft in range(3)] == [801, 798, 802]


def test_bytes_of_a_plain_and_an_engram_layer() -> None:
    config = preset("v4.1-flash")

    def layer_bytes(layer: int) -> int:
        return sum(spec.nbytes for spec in layer_schema(config, config.plan[layer]))

    assert layer_bytes(3) == 7_389_500_888
    assert layer_bytes(1) == 108_924_651_160


BACKBONE = ("embed", "head", "attention", "compressor", "indexer", "router", "routed_experts",
            "shared_experts", "hyper_connections", "norms")  # fmt: skip

PARTS = {
    ("routed_experts",): 543_581_798_400,
    ("shared_experts",): 1_415_577_600,
    ("attention",): 5_064_696_320,
    ("hyper_connections",): 39_323_760,
    ("compressor",): 18_352_128,
    ("indexer",): 43_516_416,
    ("embed",): 661_913_600,
    ("head",): 661_913_600,
    ("engram_tables",): 196_613_849_600,
    ("engram",): 314_654_720,
    ("vision",): 485_268_480,
    ("draft",): 14_225_362_530,
    ("router",): 78_673_920,
    BACKBONE: 551_566_180_464,
}


@pytest.mark.parametrize("parts", PARTS)
def test_parameters_of_each_part(parts: tuple[str, ...]) -> None:
    assert parameters(*parts) == PARTS[parts]


def test_parameters_of_everything() -> None:
    assert sum(spec.parameters for spec in released()) == 763_205_315_794


def activated(specs: list[TensorSpec], config: ModelConfig) -> int:
    """Parameters one token meets: chosen experts only, no Engram table."""
    total = 0
    for spec in specs:
        if spec.part == "routed_experts":
            expert = int(spec.name.split(".experts.")[1].split(".")[0])
            total += spec.parameters if expert < config.num_experts_per_tok else 0
        elif spec.part != "engram_tables":
            total += spec.parameters
    return total


def layer_activated(layer: int) -> int:
    config = preset("v4.1-flash")
    return activated(list(layer_schema(config, config.plan[layer])), config)


def test_a_plain_layer_activates_377_million() -> None:
    assert layer_activated(3) == 377_303_670


def test_prefill_activates_8_billion() -> None:
    """Encoder layers, and of layer 20 only its input norm, compressor and index-key projection."""
    config = preset("v4.1-flash")
    encoder = sum(layer_activated(layer) for layer in range(20))
    projection = [
        spec for spec in layer_schema(config, config.plan[20])
        if spec.part == "compressor" or ".indexer.wk." in spec.name or ".k_norm." in spec.name
    ]  # fmt: skip
    projected = sum(spec.parameters for spec in projection)
    assert projected == 5120 * 512 + 512 + 128 * 512 + 128
    assert encoder + projected == 7_895_563_064


def test_decode_activates_16_billion() -> None:
    """All layers, Engram projections included, and the head; without the head 15.5 billion."""
    layers = sum(layer_activated(layer) for layer in range(40))
    assert layers == 15_468_670_064
    assert layers + parameters("head") == 16_130_583_664


def test_routed_experts_are_stored_at_four_and_a_quarter_bits() -> None:
    names = [
        f"layers.0.ffn.experts.0.{w}.{kind}"
        for w in ("w1", "w2", "w3")
        for kind in ("weight", "scale")
    ]
    assert sum(spec.nbytes for spec in released() if spec.name in names) == 18_800_640


def test_engram_tables_are_188_gib() -> None:
    tables = sum(spec.nbytes for spec in released() if spec.part == "engram_tables")
    assert tables == 202_758_032_400


@pytest.mark.parametrize("model", ["m1", "m2", "m3", "m6", "m7"])
def test_the_schema_lists_exactly_the_tensors_of_a_recorded_checkpoint(
    model_directory: Callable[[str], Path], model: str
) -> None:
    directory = model_directory(model)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in directory.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                part = shard.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    schema = weight_schema(ModelConfig.from_pretrained(directory))
    assert {spec.name: (spec.tag, spec.shape) for spec in schema} == found


ATTENTION = {
    "wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight", "wo_a.weight",
    "wo_b.weight", "attn_sink",
}  # fmt: skip
OWNER = {"compressor.wkv.weight", "compressor.norm.weight", "indexer.wk.weight",
         "indexer.k_norm.weight"}  # fmt: skip
INDEX = {"indexer.wq_b.weight", "indexer.weights_proj.weight"}


def test_each_role_owns_exactly_its_attention_tensors() -> None:
    """No per-head query norm, no compressor outside owners, a gate only above ratio 1 (regression
    classes: a norm of the older family applied; a nonzero ratio read as "owns a compressor")."""
    config = preset("tiny")
    expected = {
        "window": ATTENTION,
        "reuse": ATTENTION,
        "reindex": ATTENTION | INDEX,
        "full": ATTENTION | OWNER | INDEX,
    }
    for spec in config.plan.layers:
        prefix = f"layers.{spec.layer_id}.attn."
        names = {
            t.name.removeprefix(prefix) for t in layer_schema(config, spec) if prefix in t.name
        }
        gate = (
            {"compressor.wgate.weight"}
            if spec.role == "full" and spec.compress_ratio > 1
            else set()
        )
        assert names == expected[spec.role] | gate
