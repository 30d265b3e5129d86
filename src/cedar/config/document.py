"""config.json documents: reading either released layout, finding unknown keys, writing back unchanged.

Only `model_config.py` calls this file; the name map is `fields.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cedar.config import fields as layout
from cedar.config.types import Layout, VisionConfig, WeightDtype
from cedar.errors import ConfigError

if TYPE_CHECKING:
    from cedar.config.model_config import ModelConfig

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"


def _get(document: Mapping[str, Any], path: str) -> Any:
    node: Any = document
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return layout.REQUIRED
        node = node[part]
    return node


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        document = document.setdefault(part, {})
    document[leaf] = list(value) if isinstance(value, tuple) else value


def _read(
    document: Mapping[str, Any],
    spec: layout.Field,
    path: str | None,
    annotations: Mapping[str, str],
) -> Any:
    value = layout.REQUIRED if path is None else _get(document, path)
    if value is layout.REQUIRED:
        value = spec.default
    if value is layout.REQUIRED:
        raise ConfigError(
            f"config key {path} is missing; cedar never invents a default for it, since a guess "
            f"would silently change the model"
        )
    return _typed(spec.name, path, value, annotations)


def _typed(name: str, path: str | None, value: Any, annotations: Mapping[str, str]) -> Any:
    annotation = annotations[name]
    where = path or name
    if annotation.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or not all(type(v) is int for v in value):
            raise ConfigError(f"config key {where}={value!r} must be a list of integers")
        return tuple(value)
    if value is None and "None" in annotation:
        return None
    if annotation.startswith("int") and type(value) is not int:
        raise ConfigError(f"config key {where}={value!r} must be an integer")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation.startswith("float") and not is_number:
        raise ConfigError(f"config key {where}={value!r} must be a number")
    if annotation == "bool" and not isinstance(value, bool):
        raise ConfigError(f"config key {where}={value!r} must be true or false")
    if annotation == "str" and not isinstance(value, str):
        raise ConfigError(f"config key {where}={value!r} must be a string")
    return value


def _annotations(cls: type[ModelConfig]) -> dict[str, str]:
    return {f.name: str(f.type) for kind in (cls, VisionConfig) for f in fields(kind)}


def check_model_type(document: Mapping[str, Any]) -> None:
    """Refuse other model types; names are matched exactly."""
    model_type = document.get("model_type", MODEL_TYPE)
    if model_type != MODEL_TYPE:
        raise ConfigError(
            f"model_type={model_type!r} is not supported; cedar runs {MODEL_TYPE!r} only (names are "
            f"matched exactly, an older or newer family member is another architecture)"
        )


def _normalise_rope(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fold the newer `rope_parameters` spelling into `rope_theta` + `rope_scaling`."""
    text = document["text_config"]
    if "rope_parameters" not in text or text.get("rope_scaling") is not None:
        return document
    if not isinstance(text["rope_parameters"], Mapping):
        raise ConfigError(
            f"config key text_config.rope_parameters={text['rope_parameters']!r} must be an object"
        )
    text = dict(text)
    parameters = dict(text["rope_parameters"])
    if "rope_theta" in parameters:
        text["rope_theta"] = parameters.pop("rope_theta")
    text["rope_scaling"] = parameters
    return {**document, "text_config": text}


def read_nested(cls: type[ModelConfig], source: Mapping[str, Any]) -> ModelConfig:
    """A config from the nested Hugging Face layout. Raises as `ModelConfig.from_dict`."""
    check_model_type(source)
    if not isinstance(source["text_config"], Mapping):
        raise ConfigError("config key text_config must be an object")
    document, types = _normalise_rope(source), _annotations(cls)
    values = {
        f.name: _read(document, f, f.nested, types) for f in layout.TEXT_FIELDS + layout.ROOT_FIELDS
    }
    scaling = _get(document, "text_config.rope_scaling")
    rope_type = (
        scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    )
    if rope_type != "yarn":
        raise ConfigError(
            f"rope_scaling.rope_type={rope_type!r} is not supported; this architecture uses 'yarn'"
        )
    _check_fixed(document, layout.FIXED_NESTED)
    vision = None
    if document.get("vision_config"):
        vision = VisionConfig(
            **{
                f.name: _read(document, f, f"vision_config.{f.nested}", types)
                for f in layout.VISION_FIELDS
            }
        )
    dense, expert = _quantization(document.get("quantization_config"))
    return cls(
        **values,
        dense_dtype=dense,
        expert_dtype=expert,
        vision=vision,
        source_layout="nested",
        source=copy.deepcopy(dict(source)),
    )


def read_flat(cls: type[ModelConfig], source: Mapping[str, Any]) -> ModelConfig:
    """A config from the flat inference layout. Raises as `ModelConfig.from_dict`."""
    types = _annotations(cls)
    values = {
        f.name: _read(source, f, f.flat, types) for f in layout.TEXT_FIELDS + layout.ROOT_FIELDS
    }
    _check_fixed(source, layout.FIXED_FLAT)
    vision = None
    if source.get("vision_n_layers"):
        vision = VisionConfig(
            **{f.name: _read(source, f, f.flat, types) for f in layout.VISION_FIELDS}
        )
    dense = source.get("dtype", "bf16")
    expert = source.get("expert_dtype") or dense
    for key, value in (("dtype", dense), ("expert_dtype", expert)):
        if value not in ("bf16", "fp8", "fp4"):
            raise ConfigError(
                f"config key {key}={value!r} is not supported; allowed: bf16, fp8, fp4"
            )
    return cls(
        **values,
        dense_dtype=dense,
        expert_dtype=expert,
        vision=vision,
        source_layout="flat",
        source=copy.deepcopy(dict(source)),
    )


def _quantization(block: Mapping[str, Any] | None) -> tuple[WeightDtype, WeightDtype]:
    if not block:
        return "bf16", "bf16"
    if not isinstance(block, Mapping):
        raise ConfigError(f"config key quantization_config={block!r} must be an object")
    expected: dict[str, Any] = {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
    }
    for key, value in expected.items():
        if block.get(key) != value:
            raise ConfigError(
                f"quantization_config.{key}={block.get(key)!r} is not supported; allowed: {value!r}"
            )
    expert = block.get("expert_dtype", "fp8")
    if expert not in ("fp8", "fp4"):
        raise ConfigError(
            f"quantization_config.expert_dtype={expert!r} is not supported; allowed: fp8, fp4"
        )
    return "fp8", expert


def _check_fixed(document: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for path, allowed in fixed.items():
        value = _get(document, path)
        if value is not layout.REQUIRED and value != allowed:
            raise ConfigError(
                f"config key {path}={value!r} is not part of this architecture; allowed: {allowed!r}"
            )


def known_paths(source_layout: Layout) -> tuple[set[str], set[str]]:
    """Paths that mean something, and paths that carry no arithmetic."""
    every = layout.TEXT_FIELDS + layout.ROOT_FIELDS
    if source_layout == "flat":
        known = {f.flat for f in every if f.flat} | {f.flat for f in layout.VISION_FIELDS if f.flat}
        return known, set(layout.FIXED_FLAT) | set(layout.INERT_FLAT)
    known = {f.nested for f in every} | {"text_config.rope_parameters"}
    return known, set(layout.FIXED_NESTED) | set(layout.INERT_NESTED)


def leaf_paths(node: Mapping[str, Any], stop: set[str], prefix: str = "") -> list[str]:
    """Dotted paths of all leaves; objects named in `stop` count as leaves."""
    paths: list[str] = []
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in stop:
            paths += leaf_paths(value, stop, f"{path}.")
        else:
            paths.append(path)
    return paths


def write_document(config: ModelConfig) -> dict[str, Any]:
    """The document a config was read from, with changed fields written in place."""
    flat = config.source_layout == "flat"
    document: dict[str, Any] = copy.deepcopy(dict(config.source))
    if not document:
        document = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "dtype": "bfloat16"}
        document["text_config"] = {"model_type": f"{MODEL_TYPE}_text"}
        document["text_config"]["rope_scaling"] = {"rope_type": "yarn"}
        document["text_config"] |= {
            path.removeprefix("text_config."): value for path, value in layout.FIXED_NESTED.items()
        }
    elif not flat and "rope_parameters" in document["text_config"]:
        document = copy.deepcopy(dict(_normalise_rope(document)))
        document["text_config"].pop("rope_parameters")
    for spec in layout.TEXT_FIELDS + layout.ROOT_FIELDS:
        path = spec.flat if flat else spec.nested
        value = getattr(config, spec.name)
        if path is None or (_get(document, path) is layout.REQUIRED and value == spec.default):
            continue
        if _get(document, path) != (list(value) if isinstance(value, tuple) else value):
            _put(document, path, value)
    if not flat:
        _write_nested_extras(config, document)
    return _as_read(config, document)


def _write_nested_extras(config: ModelConfig, document: dict[str, Any]) -> None:
    if (config.dense_dtype, config.expert_dtype) != _quantization(
        document.get("quantization_config")
    ):
        document.pop("quantization_config", None)
        if config.dense_dtype != "bf16":
            document["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": config.expert_dtype,
            }
    if config.vision is None:
        document.pop("vision_config", None)
    elif not document.get("vision_config"):
        document["vision_config"] = {"model_type": f"{MODEL_TYPE}_vision"} | {
            f.name: getattr(config.vision, f.name) for f in layout.VISION_FIELDS
        }


def _as_read(config: ModelConfig, document: dict[str, Any]) -> dict[str, Any]:
    """Give back the original document, spelling included, when nothing in it has changed."""
    if config.source and type(config).from_dict(config.source) == config:
        return copy.deepcopy(dict(config.source))
    return document
