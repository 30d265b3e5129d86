"""Refusals around Engram, draft layers, fixed keys and quantisation; each message is read."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_documents import flat_of

from cedar.config.engram_hash import engram_hash
from cedar.config.fields import DSPARK_SCALARS, ENGRAM_SCALARS, TEXT_FIELDS
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.errors import ConfigError, UsageError

Document = dict[str, Any]


def refused(message: str, base: str = "tiny", **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(preset(base), **changes)


@pytest.fixture
def engram_document(model_directory: Callable[[str], Path]) -> Document:
    document: Document = json.loads((model_directory("m3") / "config.json").read_text())
    return document


@pytest.mark.parametrize("name", ENGRAM_SCALARS)
def test_each_missing_engram_constant_is_named(engram_document: Document, name: str) -> None:
    """A guess would hash to wrong rows without any other symptom."""
    del engram_document["text_config"][name]
    with pytest.raises(ConfigError, match=f"config key {name} is missing, but engram_layer_ids="):
        ModelConfig.from_dict(engram_document)


def test_each_missing_engram_constant_is_named_in_the_flat_layout() -> None:
    for spec in TEXT_FIELDS:
        if spec.name in ENGRAM_SCALARS:
            document = flat_of(preset("v4.1-flash"))
            del document[spec.flat]
            with pytest.raises(ConfigError, match=f"config key {spec.name} is missing"):
                ModelConfig.from_dict(document)


def test_there_is_one_engram_row_count_per_layer(engram_document: Document) -> None:
    engram_document["text_config"]["engram_num_embeddings"] = [434]
    with pytest.raises(
        ConfigError, match=r"engram_num_embeddings has 1 entries for 2 Engram layers"
    ):
        ModelConfig.from_dict(engram_document)


def test_engram_row_counts_are_the_sums_of_the_derived_primes(engram_document: Document) -> None:
    engram_document["text_config"]["engram_num_embeddings"] = [434, 607]
    config = ModelConfig.from_dict(engram_document)
    with pytest.raises(ConfigError, match=r"=\[434, 607\] does not match .* sum to \[434, 606\]"):
        engram_hash(config, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("engram_max_ngram_size", 1, "engram_max_ngram_size=1 must be at least 2"),
        ("engram_head_dim", 48, "engram_head_dim=48 must be a multiple of 32"),
        ("engram_pad_token_id", 512, "engram_pad_token_id=512 is not in the vocabulary; .*0..511"),
        ("engram_compressed_vocab_size", 0, "engram_compressed_vocab_size=0 must be at least 1"),
    ],
)
def test_engram_sizes_are_possible(
    engram_document: Document, name: str, value: int, message: str
) -> None:
    engram_document["text_config"][name] = value
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(engram_document)


@pytest.mark.parametrize("name", DSPARK_SCALARS)
def test_each_missing_draft_field_is_named(name: str) -> None:
    refused(
        f"config key {name} is missing, but num_nextn_predict_layers=3",
        "v4.1-flash",
        **{name: None},
    )


FIXED = [
    ("num_key_value_heads", 2),
    ("hidden_act", "gelu"),
    ("topk_method", "greedy"),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("tie_word_embeddings", True),
]


@pytest.mark.parametrize(("key", "value"), FIXED)
def test_other_values_of_fixed_keys_are_refused(
    engram_document: Document, key: str, value: object
) -> None:
    engram_document["text_config"][key] = value
    message = re.escape(f"config key text_config.{key}={value!r} is not part of this architecture")
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(engram_document)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", None])
def test_only_yarn_is_known(engram_document: Document, rope_type: str | None) -> None:
    engram_document["text_config"]["rope_scaling"]["rope_type"] = rope_type
    with pytest.raises(
        ConfigError, match=f"rope_type={rope_type!r} is not supported; .* uses 'yarn'"
    ):
        ModelConfig.from_dict(engram_document)


QUANTISATION = [
    ("quant_method", "awq", "'fp8'"),
    ("weight_block_size", [128, 128], r"\[32, 32\]"),
    ("scale_fmt", "float", "'ue8m0'"),
    ("expert_dtype", "int4", "fp8, fp4"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), QUANTISATION)
def test_other_quantisations_are_refused(
    model_directory: Callable[[str], Path], key: str, value: object, allowed: str
) -> None:
    """128 x 128 blocks would silently rescale every weight."""
    document = json.loads((model_directory("m2") / "config.json").read_text())
    document = copy.deepcopy(document)
    document["quantization_config"][key] = value
    message = (
        rf"quantization_config.{key}={re.escape(repr(value))} is not supported; allowed: {allowed}"
    )
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(document)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown preset 'tiny-1'; allowed: v4.1-flash, article"):
        preset("tiny-1")
