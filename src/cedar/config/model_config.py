"""`ModelConfig`: the frozen description of a model, read from either released config layout.

Field names are those of the Hugging Face config. Unknown keys are kept, listed and written back.
Callers: everything that needs to know the model. The layer plan is derived once, in `plan`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cedar.config import fields as layout
from cedar.config.layer_plan import LayerPlan, PlanLists, build_plan
from cedar.errors import ConfigError

Layout = Literal["nested", "flat"]
WeightDtype = Literal["bf16", "fp8", "fp4"]

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower's fields; recognised and sized, the tower is not run."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model of the DeepSeek-V4.1-Flash architecture.

    Attributes follow `config/fields.py`; those that are not in the release:
        num_encoder_layers: the encoder/decoder cut; None means max(kv_source_layer_ids).
        decoder_kv_input: "boundary" (CED: decoder KV rows come from the encoder's last stream) or
            "self" (every decoder full layer reads its own input; no CED).
        kv_adapter, kv_adapter_rank: per-layer map of borrowed rows: none, diag or lowrank.
        dense_dtype, expert_dtype: storage of the projections and of the routed experts.
        vision: the vision tower, None for a text model.
        source_layout, source: the document this was read from, for writing it back unchanged.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_max_position_embeddings: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int | None
    engram_vocab_size: int | None
    engram_n_heads: int | None
    engram_head_dim: int | None
    engram_pad_token_id: int | None
    engram_compressed_vocab_size: int | None
    num_nextn_predict_layers: int
    dspark_block_size: int | None
    dspark_noise_token_id: int | None
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int | None
    dspark_n_routed_experts: int | None
    dspark_num_experts_per_tok: int | None
    num_encoder_layers: int | None
    decoder_kv_input: str
    kv_adapter: str
    kv_adapter_rank: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    dense_dtype: WeightDtype
    expert_dtype: WeightDtype
    vision: VisionConfig | None
    source_layout: Layout = "nested"
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_engram(self)
        _check_draft(self)
        # Building the plan here makes an invalid plan impossible to hold.
        _ = self.plan

    @cached_property
    def plan(self) -> LayerPlan:
        """The validated layer plan."""
        names = {f.name for f in fields(PlanLists)}
        return build_plan(PlanLists(**{name: getattr(self, name) for name in names}))

    @property
    def unknown_keys(self) -> tuple[str, ...]:
        """Dotted paths of keys that mean nothing to cedar; kept and written back."""
        known, inert = _known_paths(self.source_layout)
        return tuple(p for p in _leaf_paths(self.source, known | inert) if p not in known | inert)

    def variant(self, *, ced: bool, csa2: bool) -> ModelConfig:
        """One of the four flows: the same sizes with CED and CSA2 switched on or off.

        Args:
            ced: decoder KV rows come from the encoder boundary, prefill may skip the decoder.
            csa2: layers share KV rows and index keys as in this config; off makes every
                non-window layer full, with its own rows and keys and no candidate pool.
        """
        changes: dict[str, Any] = {
            "num_encoder_layers": self.plan.num_encoder_layers,
            "decoder_kv_input": "boundary" if ced else "self",
        }
        if not csa2:
            owners = tuple(s.layer_id for s in self.plan.layers if s.compress_ratio > 0)
            changes |= {
                "kv_source_layer_ids": owners,
                "index_source_layer_ids": owners,
                "candidate_source_layer_id": -1,
                "kv_adapter": "none",
                "kv_adapter_rank": 0,
            }
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json in the nested or the flat layout.

        Raises:
            ConfigError: a key is missing (named), has the wrong type, or breaks a rule.
        """
        if "text_config" in document:
            return _from_nested(cls, document)
        if "n_layers" in document or "dim" in document:
            return _from_flat(cls, document)
        _check_model_type(document)
        raise ConfigError(
            "config has neither text_config (nested Hugging Face layout) nor n_layers (flat "
            "inference layout); expected one of the two released layouts"
        )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` in a model directory, or the file itself."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{file} does not exist; a model directory needs a config.json"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        if not isinstance(document, dict):
            raise ConfigError(f"{file} holds a {type(document).__name__}, expected a JSON object")
        try:
            return cls.from_dict(document)
        except ConfigError as error:
            raise type(error)(f"{file}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The document this was read from, with changed fields written in place."""
        return _to_document(self)


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


def _read(document: Mapping[str, Any], spec: layout.Field, path: str | None) -> Any:
    value = layout.REQUIRED if path is None else _get(document, path)
    if value is layout.REQUIRED:
        value = spec.default
    if value is layout.REQUIRED:
        raise ConfigError(
            f"config key {path} is missing; cedar never invents a default for it, since a guess "
            f"would silently change the model"
        )
    return _typed(spec.name, path, value)


def _typed(name: str, path: str | None, value: Any) -> Any:
    annotation = _annotations()[name]
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


def _annotations() -> dict[str, str]:
    return {f.name: str(f.type) for cls in (ModelConfig, VisionConfig) for f in fields(cls)}


def _check_model_type(document: Mapping[str, Any]) -> None:
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


def _from_nested(cls: type[ModelConfig], source: Mapping[str, Any]) -> ModelConfig:
    _check_model_type(source)
    if not isinstance(source["text_config"], Mapping):
        raise ConfigError("config key text_config must be an object")
    document = _normalise_rope(source)
    values = {f.name: _read(document, f, f.nested) for f in layout.TEXT_FIELDS + layout.ROOT_FIELDS}
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
                f.name: _read(document, f, f"vision_config.{f.nested}")
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


def _from_flat(cls: type[ModelConfig], source: Mapping[str, Any]) -> ModelConfig:
    values = {f.name: _read(source, f, f.flat) for f in layout.TEXT_FIELDS + layout.ROOT_FIELDS}
    _check_fixed(source, layout.FIXED_FLAT)
    vision = None
    if source.get("vision_n_layers"):
        vision = VisionConfig(**{f.name: _read(source, f, f.flat) for f in layout.VISION_FIELDS})
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


def _check_shapes(config: ModelConfig) -> None:
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                 "q_lora_rank", "o_groups", "o_lora_rank", "n_routed_experts", "num_experts_per_tok",
                 "moe_intermediate_size", "sliding_window", "index_n_heads", "index_head_dim",
                 "index_topk", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"):  # fmt: skip
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1")
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"o_groups={config.o_groups}"
        )
    if config.head_dim % 32 or config.index_head_dim % 32:
        raise ConfigError(
            f"head_dim={config.head_dim} and index_head_dim={config.index_head_dim} must be "
            f"multiples of 32, the window and index-key scale group (main rows need 16)"
        )
    rope = config.qk_rope_head_dim
    if rope < 2 or rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        raise ConfigError(
            f"qk_rope_head_dim={rope} must be even and at most head_dim={config.head_dim} and "
            f"index_head_dim={config.index_head_dim}"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            f"num_experts_per_tok={config.num_experts_per_tok} exceeds "
            f"n_routed_experts={config.n_routed_experts}"
        )
    if config.n_shared_experts != 1:
        raise ConfigError(
            f"n_shared_experts={config.n_shared_experts} is not supported; allowed: 1"
        )
    if config.scoring_func not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise ConfigError(
            f"scoring_func={config.scoring_func!r} is not supported; allowed: sqrtsoftplus, "
            f"sigmoid, softmax"
        )
    if config.decoder_kv_input not in ("boundary", "self"):
        raise ConfigError(
            f"decoder_kv_input={config.decoder_kv_input!r}; allowed: boundary (CED), self"
        )
    if config.kv_adapter not in ("none", "diag", "lowrank"):
        raise ConfigError(f"kv_adapter={config.kv_adapter!r}; allowed: none, diag, lowrank")
    if config.kv_adapter == "lowrank" and config.kv_adapter_rank < 1:
        raise ConfigError("kv_adapter='lowrank' needs kv_adapter_rank >= 1")
    _check_numbers(config)
    _check_quantised_widths(config)


def _check_numbers(config: ModelConfig) -> None:
    for name in ("rope_theta", "compress_rope_theta", "rope_factor", "rope_beta_fast",
                 "rope_beta_slow", "rope_original_max_position_embeddings"):  # fmt: skip
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name}={getattr(config, name)} must be finite and above 0")
    for name in ("rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor"):
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name}={getattr(config, name)} must be finite and at least 0")


def _check_quantised_widths(config: ModelConfig) -> None:
    group_width = config.num_attention_heads // config.o_groups * config.head_dim
    widths = {"hidden_size": config.hidden_size, "q_lora_rank": config.q_lora_rank,
              "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
              "heads per group * head_dim": group_width}  # fmt: skip
    checked = dict(widths) if config.dense_dtype != "bf16" else {}
    if config.expert_dtype != "bf16":
        checked |= {
            "hidden_size": config.hidden_size,
            "moe_intermediate_size": config.moe_intermediate_size,
        }
    for name, width in checked.items():
        if width % 32:
            raise ConfigError(
                f"{name}={width} must be a multiple of 32: quantised weights have one scale per 32 "
                f"input columns"
            )


def _check_engram(config: ModelConfig) -> None:
    if not config.engram_layer_ids:
        return
    for name in layout.ENGRAM_SCALARS:
        if getattr(config, name) is None:
            raise ConfigError(
                f"config key {name} is missing, but engram_layer_ids={list(config.engram_layer_ids)}: "
                f"without it n-grams hash to wrong rows"
            )
    _check_engram_sizes(config)
    if len(config.engram_num_embeddings) != len(config.engram_layer_ids):
        raise ConfigError(
            f"engram_num_embeddings has {len(config.engram_num_embeddings)} entries for "
            f"{len(config.engram_layer_ids)} Engram layers {list(config.engram_layer_ids)}: one row "
            f"count per layer is needed"
        )


def _check_engram_sizes(config: ModelConfig) -> None:
    for name, least in (("engram_max_ngram_size", 2), ("engram_vocab_size", 1), ("engram_n_heads", 1),
                        ("engram_head_dim", 32), ("engram_compressed_vocab_size", 1)):  # fmt: skip
        if getattr(config, name) < least:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least {least}")
    assert config.engram_head_dim is not None and config.engram_pad_token_id is not None
    if config.engram_head_dim % 32:
        raise ConfigError(
            f"engram_head_dim={config.engram_head_dim} must be a multiple of 32: table rows have one "
            f"scale per 32 values"
        )
    if not 0 <= config.engram_pad_token_id < config.vocab_size:
        raise ConfigError(
            f"engram_pad_token_id={config.engram_pad_token_id} is not in the vocabulary; allowed "
            f"0..{config.vocab_size - 1}"
        )


def _check_draft(config: ModelConfig) -> None:
    if config.num_nextn_predict_layers < 0:
        raise ConfigError(
            f"num_nextn_predict_layers={config.num_nextn_predict_layers} must be at least 0"
        )
    for name in layout.DSPARK_SCALARS if config.num_nextn_predict_layers else ():
        if getattr(config, name) is None:
            raise ConfigError(
                f"config key {name} is missing, but num_nextn_predict_layers="
                f"{config.num_nextn_predict_layers}: the draft layers cannot be described without it"
            )


def _known_paths(source_layout: Layout) -> tuple[set[str], set[str]]:
    every = layout.TEXT_FIELDS + layout.ROOT_FIELDS
    if source_layout == "flat":
        known = {f.flat for f in every if f.flat} | {f.flat for f in layout.VISION_FIELDS if f.flat}
        return known, set(layout.FIXED_FLAT) | set(layout.INERT_FLAT)
    known = {f.nested for f in every} | {"text_config.rope_parameters"}
    return known, set(layout.FIXED_NESTED) | set(layout.INERT_NESTED)


def _leaf_paths(node: Mapping[str, Any], stop: set[str], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in stop:
            paths += _leaf_paths(value, stop, f"{path}.")
        else:
            paths.append(path)
    return paths


def _to_document(config: ModelConfig) -> dict[str, Any]:
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
    if config.source and ModelConfig.from_dict(config.source) == config:
        return copy.deepcopy(dict(config.source))
    return document
