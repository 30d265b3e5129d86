"""Where each config field is spelled in the two released layouts; the tables `model_config` reads by.

The release ships a nested Hugging Face `config.json` (root keys, `text_config`, `vision_config`,
`quantization_config`) and a flat `inference/config.json`. This file holds only the name map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


class _Required:
    """Marks a field that has no default: absent means the config is refused."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()


@dataclass(frozen=True, slots=True)
class Field:
    """One config field.

    Args:
        name: attribute of `ModelConfig`; the Hugging Face name.
        nested: dotted path in the nested layout.
        flat: key in the flat layout; None where that layout does not have it.
        default: value when absent, or `REQUIRED`.
    """

    name: str
    nested: str
    flat: str | None
    default: Any = REQUIRED


def _text(name: str, flat: str | None, default: Any = REQUIRED, nested: str | None = None) -> Field:
    return Field(name, f"text_config.{nested or name}", flat, default)


TEXT_FIELDS: Final = (
    _text("vocab_size", "vocab_size"),
    _text("hidden_size", "dim"),
    _text("num_hidden_layers", "n_layers"),
    _text("num_attention_heads", "n_heads"),
    _text("head_dim", "head_dim"),
    _text("qk_rope_head_dim", "rope_head_dim"),
    _text("q_lora_rank", "q_lora_rank"),
    _text("o_groups", "o_groups"),
    _text("o_lora_rank", "o_lora_rank"),
    _text("rms_norm_eps", "norm_eps"),
    _text("max_position_embeddings", "max_position_embeddings", 1048576),
    _text("rope_theta", "rope_theta"),
    _text("compress_rope_theta", "compress_rope_theta"),
    _text("rope_factor", "rope_factor", nested="rope_scaling.factor"),
    _text("rope_beta_fast", "beta_fast", nested="rope_scaling.beta_fast"),
    _text("rope_beta_slow", "beta_slow", nested="rope_scaling.beta_slow"),
    _text(
        "rope_original_max_position_embeddings",
        "original_seq_len",
        nested="rope_scaling.original_max_position_embeddings",
    ),
    _text("n_routed_experts", "n_routed_experts"),
    _text("n_shared_experts", "n_shared_experts", 1),
    _text("num_experts_per_tok", "n_activated_experts"),
    _text("moe_intermediate_size", "moe_inter_dim"),
    _text("scoring_func", "score_func"),
    _text("norm_topk_prob", "norm_topk_prob", True),
    _text("routed_scaling_factor", "route_scale"),
    _text("swiglu_limit", "swiglu_limit"),
    _text("sliding_window", "window_size"),
    _text("compress_ratios", "compress_ratios"),
    _text("kv_source_layer_ids", "kv_source_layers"),
    _text("index_source_layer_ids", "index_source_layers"),
    _text("candidate_source_layer_id", "candidate_source_layer", -1),
    _text("candidate_topk_blocks", "candidate_topk_blocks", 0),
    _text("candidate_block_size", "candidate_block_size", 0),
    _text("index_n_heads", "index_n_heads"),
    _text("index_head_dim", "index_head_dim"),
    _text("index_topk", "index_topk"),
    _text("hc_mult", "hc_mult"),
    _text("hc_sinkhorn_iters", "hc_sinkhorn_iters"),
    _text("hc_eps", "hc_eps"),
    _text("engram_layer_ids", "engram_layer_ids", ()),
    _text("engram_num_embeddings", "engram_num_embeddings", ()),
    _text("engram_max_ngram_size", "engram_max_ngram_size", None),
    _text("engram_vocab_size", "engram_vocab_size", None),
    _text("engram_n_heads", "engram_n_heads", None),
    _text("engram_head_dim", "engram_head_dim", None),
    _text("engram_pad_token_id", "engram_pad_id", None),
    _text("engram_compressed_vocab_size", "engram_compressed_vocab_size", None),
    _text("num_nextn_predict_layers", "n_mtp_layers", 0),
    _text("dspark_block_size", "dspark_block_size", None),
    _text("dspark_noise_token_id", "dspark_noise_token_id", None),
    _text("dspark_target_layer_ids", "dspark_target_layer_ids", ()),
    _text("dspark_markov_rank", "dspark_markov_rank", None),
    _text("dspark_n_routed_experts", "dspark_n_routed_experts", None),
    _text("dspark_num_experts_per_tok", "dspark_n_activated_experts", None),
    # cedar's own plan fields; absent from the release, whose plan is their default.
    _text("num_encoder_layers", "num_encoder_layers", None),
    _text("decoder_kv_input", "decoder_kv_input", "boundary"),
    _text("kv_adapter", "kv_adapter", "none"),
    _text("kv_adapter_rank", "kv_adapter_rank", 0),
)

ROOT_FIELDS: Final = (
    Field("bos_token_id", "bos_token_id", "bos_token_id", 0),
    Field("eos_token_id", "eos_token_id", "eos_token_id", 1),
    Field("pad_token_id", "pad_token_id", "pad_token_id", 2),
    Field("image_token_id", "image_token_id", "image_token_id", None),
)

VISION_FIELDS: Final = (
    Field("num_hidden_layers", "num_hidden_layers", "vision_n_layers"),
    Field("hidden_size", "hidden_size", "vision_dim"),
    Field("num_attention_heads", "num_attention_heads", "vision_n_heads"),
    Field("intermediate_size", "intermediate_size", "vision_inter_dim"),
    Field("patch_size", "patch_size", "vision_patch_size"),
    Field("rope_theta", "rope_theta", "vision_rope_theta"),
    Field("downsample_ratio", "downsample_ratio", "vision_downsample_ratio"),
    Field("max_image_tokens", "max_image_tokens", "vision_max_n_token"),
    Field("min_pixels", "min_pixels", "vision_min_pixels"),
    Field("max_wh_ratio", "max_wh_ratio", "vision_max_wh_ratio", None),
)

#: Keys this architecture fixes: read, checked for the only value that is implemented, written back.
FIXED_NESTED: Final[dict[str, Any]] = {
    "text_config.num_key_value_heads": 1,
    "text_config.hidden_act": "silu",
    "text_config.topk_method": "noaux_tc",
    "text_config.attention_bias": False,
    "text_config.attention_dropout": 0.0,
    "text_config.tie_word_embeddings": False,
}
FIXED_FLAT: Final[dict[str, Any]] = {"gate_temp": 1.0}

#: Keys that carry no arithmetic; known, so they are not listed as unknown.
INERT_NESTED: Final = frozenset(
    {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "quantization_config",
        "vision_config",
        "text_config.model_type",
        "text_config.dtype",
        "text_config.initializer_range",
        "text_config.use_cache",
        "text_config.rope_scaling.rope_type",
        "text_config.rope_scaling.type",
    }
)
INERT_FLAT: Final = frozenset(
    {"dtype", "expert_dtype", "max_batch_size", "max_seq_len", "temperature"}
)

ENGRAM_SCALARS: Final = (
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
)
DSPARK_SCALARS: Final = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
