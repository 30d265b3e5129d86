"""Recorded index keys, selections and candidate pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from closeness import assert_same_bits
from torch import Tensor, nn

from cedar.cache.cached_rows import CachedRows, CallRules
from cedar.cache.state import ModelState
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.formats.codec import decode_rows
from cedar.kernels.operators import Operators
from cedar.kernels.reference_index import block_mask, pool_mask, positions_of
from cedar.model.indexer import Indexer
from cedar.model.kv import Groups
from cedar.model.rotary import Rotary
from cedar.model.spans import Spans

Recorded = dict[str, Tensor]


def two_sources(params: list[int]) -> ModelConfig:
    """Layer 0 owns the keys; layer 1 scores them with its own queries."""
    ratio, topk, _, block_size, blocks = params
    return replace(
        preset("tiny"), hidden_size=96, head_dim=64, q_lora_rank=64, num_hidden_layers=2,
        compress_ratios=(ratio, ratio), kv_source_layer_ids=(0,), index_source_layer_ids=(0, 1),
        candidate_source_layer_id=0 if blocks else -1, candidate_topk_blocks=blocks,
        candidate_block_size=block_size, num_encoder_layers=1, index_n_heads=8, index_head_dim=32,
        index_topk=topk, rope_original_max_position_embeddings=64,
    )  # fmt: skip


class IndexerCase:
    """The recorded weights and inputs of one case, run through the cache's own row store."""

    def __init__(self, ops: Operators, recorded: Recorded, case: str) -> None:
        self.t = {
            name.rsplit(".", 1)[1]: tensor
            for name, tensor in recorded.items()
            if name.startswith(f"indexer.{case}.")
        }
        self.params = self.t["params"].tolist()
        self.config = two_sources(self.params)
        self.ops, self.rotary = ops, Rotary(self.config)
        self.state = ModelState.contiguous(self.config, max_tokens=64, batch=1)
        self.indexers = [self._indexer(layer) for layer in (0, 1)]

    def _indexer(self, layer: int) -> Indexer:
        indexer = Indexer(self.config, self.config.plan[layer], self.ops)
        indexer.wq_b.weight = nn.Parameter(self.t[f"wq_b{layer}"])
        indexer.weights_proj.weight = nn.Parameter(self.t[f"weights_proj{layer}"])
        if layer == 0:
            indexer.wk.weight = nn.Parameter(self.t["wk"])
            indexer.k_norm.weight = nn.Parameter(self.t["k_norm"])
        return indexer

    @torch.inference_mode()
    def run(self, start: int, end: int) -> tuple[CachedRows, list[Tensor]]:
        """Store the keys of groups that close in `start .. end`, then select for those tokens."""
        ratio, spans = self.params[0], Spans((0,), (start,), (end - start,))
        rules = CallRules(global_floor=(start,), fresh_decoder=False, index_key_rule="corrected")
        rows = CachedRows(self.state, self.ops, rules)
        owner = self.config.plan[0]
        closed = torch.arange(start // ratio, end // ratio)
        if len(closed):
            latents = self.t["latent"][closed]
            positions = closed * ratio
            keys = self.indexers[0].keys(latents)
            keys = self.ops.rotate(keys, self.rotary.cos_sin(owner, positions))
            groups = Groups(latents.unsqueeze(1), None, positions, torch.zeros_like(positions))
            rows.store(owner, groups, latents, keys)
        selected = []
        table = self.rotary.cos_sin(owner, spans.positions)
        for layer, indexer in enumerate(self.indexers):
            queries = indexer.queries(self.t[f"qr{layer}"][start:end], table)
            weights = indexer.head_weights(self.t[f"x{layer}"][start:end])
            rows.select(self.config.plan[layer], spans, queries, weights)
            selected.append(rows.selections[layer][1].positions)
        return rows, selected


def expected_rows(table: Tensor, offset: int) -> list[list[int]]:
    return [[p - offset for p in row if p >= offset] for row in table.tolist()]


def rows_of(selection: Tensor) -> list[list[int]]:
    """Used slots, after checking that they are ascending and that unused ones are at the end."""
    rows = []
    for row in selection.tolist():
        used = [p for p in row if p >= 0]
        assert row == sorted(used) + [-1] * (len(row) - len(used))
        rows.append(used)
    return rows


@pytest.mark.parametrize("case", ["r1", "r2", "r1_cand"])
def test_keys_and_selections_are_the_recorded_ones(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    c = IndexerCase(ops, kernel_vectors, case)
    prefill = c.params[2]
    rows, selected = c.run(0, prefill)
    for layer in (0, 1):
        assert rows_of(selected[layer]) == expected_rows(c.t[f"prefill_idx{layer}"], 1000)
    if "prefill_candidates" in c.t:
        pool = rows.pools[0][1]
        # Whole blocks: a pool may hold positions that its query cannot see yet.
        mask = pool_mask(pool.blocks, pool.block_size, prefill)
        assert torch.equal(mask, c.t["prefill_candidates"])
    for step in range(len(c.t["decode_idx0"])):
        position = prefill + step
        rows, selected = c.run(position, position + 1)
        for layer in (0, 1):
            expected = expected_rows(c.t[f"decode_idx{layer}"][step : step + 1], 2000)
            assert rows_of(selected[layer]) == expected
        if "decode_candidates" in c.t:
            pool = rows.pools[0][1]
            width = c.t["decode_candidates"].shape[1]
            mask = pool_mask(pool.blocks, pool.block_size, width)
            mask &= torch.arange(width) < position + 1
            assert torch.equal(mask[0], c.t["decode_candidates"][step])
    fmt = c.state.formats.index
    stored = decode_rows(c.state.pool.index[0][: len(c.t["index_k"])], fmt)
    assert_same_bits(stored.to(torch.bfloat16), c.t["index_k"])


CANDIDATES = [
    (17, 3, 4, 2), (1, 3, 4, 1), (23, 3, 4, 1), (24, 2, 5, 1), (40, 4, 8, 1), (4, 2, 4, 1),
    (64, 20, 4, 1),
]  # fmt: skip


@pytest.mark.parametrize(("width", "blocks", "size", "ratio"), CANDIDATES)
def test_candidate_blocks_are_the_recorded_ones(
    kernel_vectors: Recorded, width: int, blocks: int, size: int, ratio: int
) -> None:
    name = f"candidates.w{width}_k{blocks}_b{size}_r{ratio}"
    scores, lens = kernel_vectors[f"{name}.logits"][0], kernel_vectors[f"{name}.lens"][:, 0]

    def pool(scores: Tensor, lens: Tensor) -> Tensor:
        kept = positions_of(block_mask(scores, lens, blocks, size), blocks)
        return pool_mask(kept, size, width)

    assert torch.equal(pool(scores, lens), kernel_vectors[f"{name}.mask"][0])
    last = pool(scores[-1:], torch.tensor([width]))
    assert torch.equal(last, kernel_vectors[f"{name}.decode_mask"][0])
