"""`ModelConfig`: the frozen description of a model, read from either released config layout.

Field names are those of the Hugging Face config. Unknown keys are kept, listed and written back.
Callers: everything that needs to know the model. The layer plan is derived once, in `plan`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cedar.config.checks import check_draft, check_engram, check_shapes
from cedar.config.document import (
    check_model_type,
    known_paths,
    leaf_paths,
    read_flat,
    read_nested,
    write_document,
)
from cedar.config.layer_plan import LayerPlan, PlanLists, build_plan
from cedar.config.types import Layout, VisionConfig, WeightDtype
from cedar.errors import ConfigError


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
        check_shapes(self)
        check_engram(self)
        check_draft(self)
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
        known, inert = known_paths(self.source_layout)
        return tuple(p for p in leaf_paths(self.source, known | inert) if p not in known | inert)

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
            return read_nested(cls, document)
        if "n_layers" in document or "dim" in document:
            return read_flat(cls, document)
        check_model_type(document)
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
        return write_document(self)
