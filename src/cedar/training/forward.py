"""The training forward pass: the model's own layers, with the hyper-connection seams fused.

Equal to `CausalLM.forward_dense` up to rounding (tested); exists because the seams are memory-bound
and take most of a step when each of their four operations reads the stream again.
"""

from __future__ import annotations

from torch import Tensor

from cedar.errors import ConfigError
from cedar.model.block import Block
from cedar.model.causal_lm import CausalLM
from cedar.model.rotary import RotaryTables
from cedar.model.spans import Spans
from cedar.training.fused import HyperShape, HyperWeights
from cedar.training.kernels import Kernels
from cedar.training.rows import TrainingRows


def check_trainable(model: CausalLM) -> None:
    """Raises ConfigError for what this trainer cannot train."""
    if model.config.engram_layer_ids:
        raise ConfigError(
            f"engram_layer_ids={list(model.config.engram_layer_ids)}: Engram tables are stored "
            "quantised and have no gradient; train a config without Engram layers"
        )


def _attention_weights(block: Block) -> HyperWeights:
    return HyperWeights(
        block.hc_attn_fn, block.hc_attn_base, block.hc_attn_scale, block.attn_norm.weight
    )


def _ffn_weights(block: Block) -> HyperWeights:
    return HyperWeights(
        block.hc_ffn_fn, block.hc_ffn_base, block.hc_ffn_scale, block.ffn_norm.weight
    )


def hidden_rows(model: CausalLM, ids: Tensor, rows: TrainingRows, kernels: Kernels) -> Tensor:
    """Normed hidden rows `[B * T, D]` that the head multiplies; `ids` int64 `[B, T]`."""
    config, plan = model.config, model.plan
    batch, length = ids.shape
    spans = Spans(tuple(range(batch)), (0,) * batch, (length,) * batch)
    shape = HyperShape(config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    blocks = [model.block(spec.layer_id) for spec in plan.layers]
    tables = RotaryTables(model.rotary)
    stream, pre = model.enter(ids.flatten())
    boundary_pre = pre
    now = kernels.enter(stream, pre.t().contiguous(), _attention_weights(blocks[0]), shape)
    for number, block in enumerate(blocks):
        if number == plan.num_encoder_layers:
            for owner in plan.boundary_owners:
                own = model.block(owner.layer_id)
                u = now.u
                if owner.layer_id != number:
                    u = own.attention_input(now.stream, boundary_pre)
                own.attn.append(u, spans, rows, tables)
        y = block.attn(now.u, spans, spans, rows, tables)
        now = kernels.seam(y, now, _ffn_weights(block), shape)
        z = block.ffn(now.u)
        if number + 1 == len(blocks):
            return kernels.leave(z, now, model.norm.weight, shape)
        boundary_pre = now.mix[:, : config.hc_mult]
        now = kernels.seam(z, now, _attention_weights(blocks[number + 1]), shape)
    raise AssertionError("a model has at least one layer")
