"""Named configs: the release, the article's plan, a thin body on that plan, nano and tiny test models.

`preset(name)` is used by the CLI (`preset:NAME`), the planner, training recipes and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cedar.config.model_config import ModelConfig
from cedar.config.types import VisionConfig
from cedar.errors import UsageError

#: The released text fields, as printed in the architecture's specification, section 1.3.
_RELEASE: dict[str, Any] = dict(
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_groups=8,
    o_lora_rank=1024,
    rms_norm_eps=1e-20,
    max_position_embeddings=1048576,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_factor=16,
    rope_beta_fast=32,
    rope_beta_slow=1,
    rope_original_max_position_embeddings=65536,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=2304,
    scoring_func="sqrtsoftplus",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    sliding_window=128,
    compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0),
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384006168, 384016682),
    engram_max_ngram_size=4,
    engram_vocab_size=16000000,
    engram_n_heads=8,
    engram_head_dim=256,
    engram_pad_token_id=2,
    engram_compressed_vocab_size=99092,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(37, 38, 39),
    dspark_markov_rank=256,
    dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
    num_encoder_layers=None,
    decoder_kv_input="boundary",
    kv_adapter="none",
    kv_adapter_rank=0,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    image_token_id=129264,
    dense_dtype="fp8",
    expert_dtype="fp4",
)

#: Fields that switch Engram and the draft layers off.
_NO_EXTRAS: dict[str, Any] = dict(
    engram_layer_ids=(),
    engram_num_embeddings=(),
    engram_max_ngram_size=None,
    engram_vocab_size=None,
    engram_n_heads=None,
    engram_head_dim=None,
    engram_pad_token_id=None,
    engram_compressed_vocab_size=None,
    num_nextn_predict_layers=0,
    dspark_block_size=None,
    dspark_noise_token_id=None,
    dspark_target_layer_ids=(),
    dspark_markov_rank=None,
    dspark_n_routed_experts=None,
    dspark_num_experts_per_tok=None,
    image_token_id=None,
    vision=None,
)


def _v41_flash() -> ModelConfig:
    vision = VisionConfig(
        num_hidden_layers=32,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=2816,
        patch_size=14,
        rope_theta=10000,
        downsample_ratio=3,
        max_image_tokens=1024,
        min_pixels=295936,
        max_wh_ratio=None,
    )
    return ModelConfig(**_RELEASE, vision=vision)


def _article_plan(num_layers: int) -> dict[str, Any]:
    """Groups of four layers [full, reuse, reindex, reuse], ratio 4, cut in the middle."""
    return dict(
        num_hidden_layers=num_layers,
        compress_ratios=(4,) * num_layers,
        kv_source_layer_ids=tuple(range(0, num_layers, 4)),
        index_source_layer_ids=tuple(range(0, num_layers, 2)),
        candidate_source_layer_id=-1,
        candidate_topk_blocks=0,
        candidate_block_size=0,
        num_encoder_layers=num_layers // 2,
        decoder_kv_input="boundary",
    )


def _article() -> ModelConfig:
    return ModelConfig(**(_RELEASE | _NO_EXTRAS | _article_plan(40)))


def _article_thin() -> ModelConfig:
    body: dict[str, Any] = dict(
        vocab_size=4096,
        hidden_size=128,
        num_attention_heads=4,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        index_n_heads=4,
        hc_sinkhorn_iters=6,
        dense_dtype="bf16",
        expert_dtype="bf16",
    )
    return replace(_article(), **body)


def _nano() -> ModelConfig:
    body: dict[str, Any] = dict(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=96,
        o_groups=2,
        o_lora_rank=96,
        max_position_embeddings=1048576,
        rope_factor=8,
        rope_original_max_position_embeddings=1024,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        sliding_window=64,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 4, 6),
        candidate_source_layer_id=4,
        candidate_topk_blocks=32,
        candidate_block_size=4,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        hc_sinkhorn_iters=6,
    )
    return ModelConfig(**(_RELEASE | _NO_EXTRAS | body))


def _tiny() -> ModelConfig:
    """Every role and every feature of the text model at the smallest sizes that keep it honest."""
    body: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        max_position_embeddings=4096,
        rope_original_max_position_embeddings=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        sliding_window=8,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 3, 4),
        index_source_layer_ids=(1, 3, 4, 6),
        candidate_source_layer_id=4,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        dense_dtype="bf16",
        expert_dtype="bf16",
    )
    return ModelConfig(**(_RELEASE | _NO_EXTRAS | body))


def _tiny_article() -> ModelConfig:
    plan = _article_plan(8)
    return replace(_tiny(), **plan)


def _tiny_40() -> ModelConfig:
    """The released plan, all 40 layers of it, on the tiny body."""
    plan = {
        name: _RELEASE[name]
        for name in (
            "num_hidden_layers",
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "candidate_source_layer_id",
        )
    }
    return replace(_tiny(), **plan, compress_ratios=_RELEASE["compress_ratios"][:40])


_PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "v4.1-flash": _v41_flash,
    "article": _article,
    "article-thin": _article_thin,
    "nano": _nano,
    "tiny": _tiny,
    "tiny-article": _tiny_article,
    "tiny-40": _tiny_40,
}


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The named config.

    Raises:
        UsageError: the name is unknown; the message lists the known ones.
    """
    if name not in _PRESETS:
        raise UsageError(f"unknown preset {name!r}; allowed: {', '.join(_PRESETS)}")
    return _PRESETS[name]()
