"""Every tensor a config asks for: released name, shape, dtype and the part it belongs to. No torch.

One source for the checkpoint reader (what must be there), random weights (what to make), the
exporter (what to write) and the planner (what it costs). Reproduces the released index exactly:
96,085 tensors and 510,286,023,000 payload bytes for the released config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.config.types import WeightDtype

#: safetensors dtype tags used by the release.
Tag = Literal["BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"]
Part = Literal["embed", "head", "attention", "compressor", "indexer", "adapter", "router",
               "routed_experts", "shared_experts", "hyper_connections", "norms", "engram_tables",
               "engram", "vision", "draft"]  # fmt: skip

TAG_BYTES: dict[Tag, int] = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on disk.

    Attributes:
        name: released name, without a `model.` prefix.
        shape: stored shape (packed FP4 has half the columns).
        tag: safetensors dtype.
        part: what it belongs to.
        parameters: values it stands for; 0 for scales, 2 per byte for packed FP4.
    """

    name: str
    shape: tuple[int, ...]
    tag: Tag
    part: Part
    parameters: int

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return prod(self.shape) * TAG_BYTES[self.tag]


def weight_schema(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield every tensor of a checkpoint of this config, in file order."""
    yield from _globals(config)
    for spec in config.plan.layers:
        yield from layer_schema(config, spec)
    for draft_id in range(config.num_nextn_predict_layers):
        yield from _draft(config, draft_id)
    if config.vision is not None:
        yield from _vision(config)


def layer_schema(config: ModelConfig, spec: LayerSpec) -> Iterator[TensorSpec]:
    """Yield the tensors of one backbone layer."""
    prefix = f"layers.{spec.layer_id}"
    yield from _attention(config, f"{prefix}.attn", "attention")
    if spec.role == "full":
        yield from _compressor(config, f"{prefix}.attn", spec.compress_ratio)
    if spec.role in ("full", "reindex"):
        yield from _index_queries(config, f"{prefix}.attn.indexer")
    yield from _adapter(config, f"{prefix}.attn.kv_adapter", spec)
    experts = config.n_routed_experts
    yield from _common(config, prefix, experts, config.expert_dtype)
    if spec.has_engram:
        slot = config.engram_layer_ids.index(spec.layer_id)
        yield from _engram(config, f"{prefix}.engram", config.engram_num_embeddings[slot])


def _plain(name: str, shape: tuple[int, ...], tag: Tag, part: Part) -> TensorSpec:
    return TensorSpec(name, shape, tag, part, prod(shape))


def _linear(name: str, out: int, inp: int, dtype: WeightDtype, part: Part) -> Iterator[TensorSpec]:
    """A projection `[out, in]` and, when quantised, its scale."""
    if dtype == "bf16":
        yield TensorSpec(f"{name}.weight", (out, inp), "BF16", part, out * inp)
    elif dtype == "fp8":
        yield TensorSpec(f"{name}.weight", (out, inp), "F8_E4M3", part, out * inp)
        yield TensorSpec(f"{name}.scale", (-(-out // 32), -(-inp // 32)), "F8_E8M0", part, 0)
    else:
        yield TensorSpec(f"{name}.weight", (out, inp // 2), "I8", part, out * inp)
        yield TensorSpec(f"{name}.scale", (out, inp // 32), "F8_E8M0", part, 0)


def _globals(config: ModelConfig) -> Iterator[TensorSpec]:
    width = config.hidden_size
    yield _plain("embed.weight", (config.vocab_size, width), "BF16", "embed")
    yield _plain("head.weight", (config.vocab_size, width), "BF16", "head")
    yield _plain("norm.weight", (width,), "BF16", "norms")


def _attention(config: ModelConfig, name: str, part: Part) -> Iterator[TensorSpec]:
    heads, head_dim, dense = config.num_attention_heads, config.head_dim, config.dense_dtype
    width, rank, groups = config.hidden_size, config.q_lora_rank, config.o_groups
    yield from _linear(f"{name}.wq_a", rank, width, dense, part)
    yield _plain(f"{name}.q_norm.weight", (rank,), "BF16", part)
    yield from _linear(f"{name}.wq_b", heads * head_dim, rank, dense, part)
    yield from _linear(f"{name}.wkv", head_dim, width, dense, part)
    yield _plain(f"{name}.kv_norm.weight", (head_dim,), "BF16", part)
    inner = groups * config.o_lora_rank
    yield from _linear(f"{name}.wo_a", inner, heads // groups * head_dim, dense, part)
    yield from _linear(f"{name}.wo_b", width, inner, dense, part)
    yield _plain(f"{name}.attn_sink", (heads,), "F32", part)


def _compressor(config: ModelConfig, attn: str, ratio: int) -> Iterator[TensorSpec]:
    shape = (config.head_dim, config.hidden_size)
    yield _plain(f"{attn}.compressor.wkv.weight", shape, "BF16", "compressor")
    if ratio > 1:
        yield _plain(f"{attn}.compressor.wgate.weight", shape, "BF16", "compressor")
    yield _plain(f"{attn}.compressor.norm.weight", (config.head_dim,), "BF16", "compressor")
    index_shape = (config.index_head_dim, config.head_dim)
    yield _plain(f"{attn}.indexer.wk.weight", index_shape, "BF16", "indexer")
    yield _plain(f"{attn}.indexer.k_norm.weight", (config.index_head_dim,), "BF16", "indexer")


def _index_queries(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    out = config.index_n_heads * config.index_head_dim
    yield from _linear(f"{name}.wq_b", out, config.q_lora_rank, config.dense_dtype, "indexer")
    shape = (config.index_n_heads, config.hidden_size)
    yield _plain(f"{name}.weights_proj.weight", shape, "BF16", "indexer")


def _adapter(config: ModelConfig, name: str, spec: LayerSpec) -> Iterator[TensorSpec]:
    if spec.kv_adapter == "diag":
        yield _plain(f"{name}.scale", (config.head_dim,), "F32", "adapter")
    elif spec.kv_adapter == "lowrank":
        rank = config.kv_adapter_rank
        yield _plain(f"{name}.down", (rank, config.head_dim), "F32", "adapter")
        yield _plain(f"{name}.up", (config.head_dim, rank), "F32", "adapter")


def _common(
    config: ModelConfig,
    prefix: str,
    num_experts: int,
    expert_dtype: WeightDtype,
    draft: bool = False,
) -> Iterator[TensorSpec]:
    """Norms, hyper-connections, router and experts: the same in backbone and draft layers."""

    def part(name: Part) -> Part:
        return "draft" if draft else name

    width, inner, copies = config.hidden_size, config.moe_intermediate_size, config.hc_mult
    for norm in ("attn_norm", "ffn_norm"):
        yield _plain(f"{prefix}.{norm}.weight", (width,), "BF16", part("norms"))
    mixes = copies * (copies + 2)
    for half in ("hc_attn", "hc_ffn"):
        hyper = part("hyper_connections")
        yield _plain(f"{prefix}.{half}_fn", (mixes, copies * width), "F32", hyper)
        yield _plain(f"{prefix}.{half}_base", (mixes,), "F32", hyper)
        yield _plain(f"{prefix}.{half}_scale", (3,), "F32", hyper)
    yield _plain(f"{prefix}.ffn.gate.weight", (num_experts, width), "BF16", part("router"))
    yield _plain(f"{prefix}.ffn.gate.bias", (num_experts,), "F32", part("router"))
    if config.vision is not None:
        yield _plain(f"{prefix}.ffn.gate.bias_vl", (num_experts,), "F32", part("router"))
    for expert in range(num_experts):
        name, routed = f"{prefix}.ffn.experts.{expert}", part("routed_experts")
        yield from _linear(f"{name}.w1", inner, width, expert_dtype, routed)
        yield from _linear(f"{name}.w3", inner, width, expert_dtype, routed)
        yield from _linear(f"{name}.w2", width, inner, expert_dtype, routed)
    name, shared = f"{prefix}.ffn.shared_experts", part("shared_experts")
    yield from _linear(f"{name}.w1", inner, width, config.dense_dtype, shared)
    yield from _linear(f"{name}.w3", inner, width, config.dense_dtype, shared)
    yield from _linear(f"{name}.w2", width, inner, config.dense_dtype, shared)


def _engram(config: ModelConfig, name: str, rows: int) -> Iterator[TensorSpec]:
    assert config.engram_head_dim and config.engram_n_heads and config.engram_max_ngram_size
    dim, copies, width = config.engram_head_dim, config.hc_mult, config.hidden_size
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    yield TensorSpec(f"{name}.embed.weight", (rows, dim), "F8_E4M3", "engram_tables", rows * dim)
    yield TensorSpec(f"{name}.embed.scale", (rows, dim // 32), "F8_E8M0", "engram_tables", 0)
    out = (copies + 1) * width
    yield from _linear(f"{name}.wkv", out, columns * dim, config.dense_dtype, "engram")
    yield _plain(f"{name}.q_weight", (copies, width), "BF16", "engram")
    yield _plain(f"{name}.k_weight", (copies, width), "BF16", "engram")


def _draft(config: ModelConfig, draft_id: int) -> Iterator[TensorSpec]:
    assert config.dspark_n_routed_experts and config.dspark_markov_rank
    prefix, width, rank = f"mtp.{draft_id}", config.hidden_size, config.dspark_markov_rank
    yield from _attention(config, f"{prefix}.attn", "draft")
    yield from _common(
        config, prefix, config.dspark_n_routed_experts, config.expert_dtype, draft=True
    )
    if draft_id == 0:
        inputs = len(config.dspark_target_layer_ids) * width
        yield from _linear(f"{prefix}.main_proj", width, inputs, config.dense_dtype, "draft")
        yield _plain(f"{prefix}.main_norm.weight", (width,), "BF16", "draft")
    if draft_id == config.num_nextn_predict_layers - 1:
        yield _plain(f"{prefix}.norm.weight", (width,), "BF16", "draft")
        shape = (config.vocab_size, rank)
        yield _plain(f"{prefix}.markov_head.embed.weight", shape, "BF16", "draft")
        yield _plain(f"{prefix}.markov_head.head.weight", shape, "BF16", "draft")
        yield _plain(f"{prefix}.confidence_head.proj.weight", (1, width + rank), "BF16", "draft")


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    vision, width = config.vision, config.hidden_size
    assert vision is not None

    def tensor(name: str, *shape: int) -> TensorSpec:
        return _plain(name, shape, "BF16", "vision")

    dim, inner = vision.hidden_size, vision.intermediate_size
    for name in ("image_start", "image_newline", "image_end"):
        yield tensor(name, width)
    yield tensor("vision.patch_embed.proj.weight", dim, 3 * vision.patch_size**2)
    yield tensor("vision.patch_embed.proj.bias", dim)
    for block in range(vision.num_hidden_layers):
        name = f"vision.blocks.{block}"
        yield tensor(f"{name}.norm1.weight", dim)
        yield tensor(f"{name}.norm2.weight", dim)
        yield tensor(f"{name}.attn.wqkv.weight", 3 * dim, dim)
        yield tensor(f"{name}.attn.wqkv.bias", 3 * dim)
        yield tensor(f"{name}.attn.wo.weight", dim, dim)
        yield tensor(f"{name}.attn.wo.bias", dim)
        yield tensor(f"{name}.mlp.w1.weight", 2 * inner, dim)
        yield tensor(f"{name}.mlp.w2.weight", dim, inner)
    yield tensor("vision.norm.weight", dim)
    pooled = dim * vision.downsample_ratio**2
    yield tensor("aligner.w1.weight", width, pooled)
    yield tensor("aligner.w1.bias", width)
    yield tensor("aligner.w2.weight", width, width)
    yield tensor("aligner.w2.bias", width)
