"""Recorded compressor: latents of ratio 1, 2 and 4, and the groups that stay open between calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from closeness import assert_bf16, assert_within
from torch import Tensor, nn

from cedar.cache.cached_rows import CachedRows, CallRules
from cedar.cache.state import ModelState
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.kernels.operators import Operators
from cedar.model.compressor import Compressor
from cedar.model.spans import Spans

Recorded = dict[str, Tensor]
CASES = ["r1_L1", "r1_L6", "r2_L1", "r2_L2", "r2_L7", "r2_L8", "r4_L6"]


def one_owner(ratio: int) -> ModelConfig:
    return replace(
        preset("tiny"), hidden_size=96, head_dim=64, num_hidden_layers=1, compress_ratios=(ratio,),
        kv_source_layer_ids=(0,), index_source_layer_ids=(0,), candidate_source_layer_id=-1,
        num_encoder_layers=1,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_latents_and_open_groups_match_the_recorded_ones(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    """A prefill and then single tokens, two sequences at once; groups close where recorded."""
    group = {
        name.rsplit(".", 1)[1]: tensor
        for name, tensor in kernel_vectors.items()
        if name.startswith(f"compressor.{case}.")
    }
    ratio = int(case[1])
    config = one_owner(ratio)
    spec = config.plan[0]
    compressor = Compressor(config, spec, ops)
    compressor.wkv.weight = nn.Parameter(group["wkv"])
    compressor.norm.weight = nn.Parameter(group["norm"])
    if compressor.wgate is not None:
        compressor.wgate.weight = nn.Parameter(group["wgate"])
    assert (compressor.wgate is not None) == (ratio > 1)
    state = ModelState.contiguous(config, max_tokens=64, batch=2)

    x, first = group["x"], int(group["prefill_len"])
    cuts = [0, *range(first, x.shape[1] + 1)]
    latents: list[Tensor] = []
    emitted: list[bool] = []
    for start, end in pairwise(cuts):
        spans = Spans((0, 1), (start, start), (end - start, end - start))
        rules = CallRules(
            global_floor=(start, start), fresh_decoder=False, index_key_rule="corrected"
        )
        rows = CachedRows(state, ops, rules)
        u = x[:, start:end].flatten(0, 1)
        with torch.inference_mode():
            groups = rows.complete_groups(spec, spans, *compressor.project(u))
            if groups is not None:
                closed = compressor.latents(groups, u).unflatten(0, (2, -1))
                expected = torch.arange(start // ratio, end // ratio) * ratio
                assert groups.positions.tolist() == expected.repeat(2).tolist()
                assert groups.sequences.tolist() == [0] * len(expected) + [1] * len(expected)
                latents.append(closed)
        emitted.append(groups is not None)
    assert emitted[1:] == group["step_emits"].tolist()
    assert_bf16(torch.cat(latents, 1), group["latents"])
    live = x.shape[1] % ratio
    if live:
        assert_within(state.open_kv[0][:, :live], group["kv_state"][:, :live], 1e-5)
        assert_within(state.open_gate[0][:, :live], group["score_state"][:, :live], 1e-5)


def test_gates_are_per_channel_and_pooled_before_rounding(ops: Operators) -> None:
    """Each channel has its own softmax over the tokens of a group, in float32."""
    kv = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]])
    gate = torch.tensor([[[0.0, 50.0], [0.0, -50.0]]])
    assert_within(ops.pool_groups(kv, gate), torch.tensor([[2.0, 10.0]]), 1e-6)
