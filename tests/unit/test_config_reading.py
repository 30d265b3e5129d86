"""Reading and writing config.json: both released layouts, spellings, unknown keys, missing keys."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from config_documents import flat_of

from cedar.config import fields as layout
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset, preset_names
from cedar.errors import CheckpointError, ConfigError

MODELS = ("m1", "m2", "m3", "m6", "m7")
Directory = Callable[[str], Path]
Document = dict[str, Any]


@pytest.fixture
def nested(model_directory: Directory) -> Document:
    """A complete nested document: text, quantisation, Engram, drafts, vision."""
    document: Document = json.loads((model_directory("m7") / "config.json").read_text())
    return document


@pytest.mark.parametrize("model", MODELS)
def test_a_recorded_config_is_written_back_as_it_was_read(
    model_directory: Directory, model: str
) -> None:
    file = model_directory(model) / "config.json"
    config = ModelConfig.from_pretrained(file)
    assert config.to_dict() == json.loads(file.read_text())
    assert config.unknown_keys == ()
    assert ModelConfig.from_pretrained(model_directory(model)) == config


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_the_nested_layout(name: str) -> None:
    config = preset(name)
    document = json.loads(json.dumps(config.to_dict()))
    assert "text_config" in document
    again = ModelConfig.from_dict(document)
    assert again == config
    assert again.to_dict() == document


def test_the_flat_layout_describes_the_same_model(nested: Document) -> None:
    config = ModelConfig.from_dict(nested)
    document = flat_of(config)
    flat = ModelConfig.from_dict(document)
    assert flat.source_layout == "flat"
    assert replace(flat, source_layout="nested", source={}) == config
    assert flat.to_dict() == document


def test_the_released_flat_file_has_its_64_keys() -> None:
    """The flat file of the release has exactly 64 keys; this is the same list from the name table."""
    names = {spec.flat for spec in (*layout.TEXT_FIELDS, *layout.VISION_FIELDS) if spec.flat}
    own = {"num_encoder_layers", "decoder_kv_input", "kv_adapter", "kv_adapter_rank"}
    defaulted = {"norm_topk_prob", "max_position_embeddings"}
    released = names - own - defaulted | {"dtype", "expert_dtype", "image_token_id"}
    assert len(released) == 64


def test_storage_dtype_of_the_root_is_not_the_quantisation(nested: Document) -> None:
    """`dtype: bfloat16` at the root names unquantised tensors (regression class: read as "not
    quantised"); in the flat layout the same key names the quantisation."""
    assert nested["dtype"] == "bfloat16"
    config = ModelConfig.from_dict(nested)
    assert (config.dense_dtype, config.expert_dtype) == ("fp8", "fp4")
    plain = copy.deepcopy(nested)
    del plain["quantization_config"]
    assert ModelConfig.from_dict(plain).dense_dtype == "bf16"
    assert flat_of(config)["dtype"] == "fp8"


def test_rope_parameters_is_the_same_as_rope_theta_and_rope_scaling(nested: Document) -> None:
    text = nested["text_config"]
    expected = ModelConfig.from_dict(nested)
    newer = copy.deepcopy(nested)
    del newer["text_config"]["rope_scaling"], newer["text_config"]["rope_theta"]
    newer["text_config"]["rope_parameters"] = {
        "rope_theta": text["rope_theta"],
        **text["rope_scaling"],
    }
    config = ModelConfig.from_dict(newer)
    assert config == expected
    assert config.to_dict() == newer, "the spelling that was read is the one written back"
    newer["text_config"]["rope_scaling"] = None
    assert ModelConfig.from_dict(newer) == expected
    older = copy.deepcopy(nested)
    scaling = older["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    assert ModelConfig.from_dict(older) == expected


def test_unknown_keys_are_listed_and_kept(nested: Document) -> None:
    nested["future_root"] = {"a": 1, "b": [2]}
    nested["text_config"]["future_text"] = "x"
    config = ModelConfig.from_dict(nested)
    assert set(config.unknown_keys) == {"future_root.a", "future_root.b", "text_config.future_text"}
    changed = replace(config, index_topk=config.index_topk + 1).to_dict()
    assert changed["future_root"] == {"a": 1, "b": [2]}
    assert changed["text_config"]["future_text"] == "x"
    assert changed["text_config"]["index_topk"] == config.index_topk + 1
    flat = flat_of(config) | {"future": 3}
    assert ModelConfig.from_dict(flat).unknown_keys == ("future",)


def test_a_changed_field_is_written_in_place(nested: Document) -> None:
    config = ModelConfig.from_dict(nested)
    variant = config.variant(ced=False, csa2=True)
    document = variant.to_dict()
    assert document["text_config"]["decoder_kv_input"] == "self"
    assert ModelConfig.from_dict(document) == replace(variant, source={})
    text = replace(config, vision=None, dense_dtype="bf16", expert_dtype="bf16").to_dict()
    assert "vision_config" not in text
    assert "quantization_config" not in text
    assert nested["vision_config"], "the document that was read is not changed"


REQUIRED_NESTED = [f.nested for f in layout.TEXT_FIELDS if f.default is layout.REQUIRED]
REQUIRED_FLAT = [
    f.flat for f in layout.TEXT_FIELDS if f.default is layout.REQUIRED and f.flat is not None
]


@pytest.mark.parametrize("path", REQUIRED_NESTED)
def test_a_missing_nested_key_is_named(nested: Document, path: str) -> None:
    *parents, leaf = path.split(".")
    node = nested
    for part in parents:
        node = node[part]
    del node[leaf]
    with pytest.raises(ConfigError, match=rf"config key {path} is missing; cedar never invents"):
        ModelConfig.from_dict(nested)


@pytest.mark.parametrize("key", REQUIRED_FLAT)
def test_a_missing_flat_key_is_named(nested: Document, key: str) -> None:
    document = flat_of(ModelConfig.from_dict(nested))
    del document[key]
    if key in ("n_layers", "dim"):
        assert "dim" in document or "n_layers" in document
    with pytest.raises(ConfigError, match=rf"config key {key} is missing"):
        ModelConfig.from_dict(document)


def test_the_per_layer_lists_have_no_default() -> None:
    assert {
        "text_config.compress_ratios",
        "text_config.kv_source_layer_ids",
        "text_config.index_source_layer_ids",
    } <= set(REQUIRED_NESTED)


def test_a_missing_vision_key_is_named(nested: Document) -> None:
    del nested["vision_config"]["patch_size"]
    with pytest.raises(ConfigError, match=r"config key vision_config.patch_size is missing"):
        ModelConfig.from_dict(nested)


TYPES = [
    ("hidden_size", "96", "must be an integer"),
    ("hidden_size", 96.0, "must be an integer"),
    ("index_topk", True, "must be an integer"),
    ("rms_norm_eps", "tiny", "must be a number"),
    ("routed_scaling_factor", None, "must be a number"),
    ("norm_topk_prob", 1, "must be true or false"),
    ("scoring_func", 3, "must be a string"),
    ("compress_ratios", 2, "must be a list of integers"),
    ("kv_source_layer_ids", [2, "4"], "must be a list of integers"),
    ("compress_ratios", [0, 0, 2, 2.0, 1, 1, 1, 1, 0, 0], "must be a list of integers"),
]


@pytest.mark.parametrize(("key", "value", "message"), TYPES)
def test_a_value_of_the_wrong_type_is_named(
    nested: Document, key: str, value: object, message: str
) -> None:
    nested["text_config"][key] = value
    with pytest.raises(ConfigError, match=rf"config key text_config.{key}=.*{message}"):
        ModelConfig.from_dict(nested)


SECTIONS = [
    ("text_config", [1], "text_config must be an object"),
    ("quantization_config", "fp8", "quantization_config='fp8' must be an object"),
]


@pytest.mark.parametrize(("section", "value", "message"), SECTIONS)
def test_a_section_that_is_no_object_is_refused(
    nested: Document, section: str, value: object, message: str
) -> None:
    nested[section] = value
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(nested)


def test_rope_parameters_that_are_no_object_are_refused(nested: Document) -> None:
    del nested["text_config"]["rope_scaling"]
    nested["text_config"]["rope_parameters"] = 16
    with pytest.raises(ConfigError, match=r"text_config.rope_parameters=16 must be an object"):
        ModelConfig.from_dict(nested)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v4", "deepseek_v4x", "deepseek_v41x", "llama", ""]
)
def test_only_the_exact_model_type_is_accepted(nested: Document, model_type: str) -> None:
    """A prefix match would take the older family member for this one."""
    nested["model_type"] = model_type
    with pytest.raises(
        ConfigError, match=f"model_type={model_type!r} is not supported; cedar runs"
    ):
        ModelConfig.from_dict(nested)


def test_a_document_of_neither_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"neither text_config .* nor n_layers"):
        ModelConfig.from_dict({"architectures": ["DeepseekV41ForCausalLM"]})
    with pytest.raises(ConfigError, match="model_type='llama' is not supported"):
        ModelConfig.from_dict({"model_type": "llama", "hidden_size": 64})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist; a model directory needs"):
        ModelConfig.from_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list, expected a JSON object"):
        ModelConfig.from_pretrained(tmp_path)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    file.write_text(json.dumps({"text_config": {}}))
    with pytest.raises(CheckpointError, match=r"config.json: config key text_config.vocab_size"):
        ModelConfig.from_pretrained(tmp_path)


def test_every_field_has_a_place_in_the_nested_layout() -> None:
    """A field without a spelling would be lost on writing."""
    named = {f.name for f in layout.TEXT_FIELDS + layout.ROOT_FIELDS}
    extras = {"dense_dtype", "expert_dtype", "vision", "source_layout", "source"}
    assert named == {f.name for f in fields(ModelConfig)} - extras
