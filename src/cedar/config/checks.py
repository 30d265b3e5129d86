"""Rules a config must keep, one clear error each. Called by `ModelConfig` when one is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cedar.config import fields as layout
from cedar.errors import ConfigError

if TYPE_CHECKING:
    from cedar.config.model_config import ModelConfig


def check_shapes(config: ModelConfig) -> None:
    """Sizes, multiples and enumerated values."""
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


def check_engram(config: ModelConfig) -> None:
    """Engram keys that must be there together."""
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


def check_draft(config: ModelConfig) -> None:
    """Draft-layer keys that must be there together."""
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
