"""Recorded Engram constants, n-gram hashes, gates and the compressed token map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_bf16, assert_same_bits
from torch import Tensor, nn

from cedar.config.engram_hash import DEAD, EngramHash, engram_hash
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.kernels.operators import Operators
from cedar.model.engram import Engram
from cedar.text.token_map import token_map

Recorded = dict[str, Tensor]
HASHES = ["hash_a", "hash_b", "hash_c"]


def engram_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        engram_layer_ids=(0,), engram_num_embeddings=(1,), engram_max_ngram_size=3,
        engram_vocab_size=50, engram_n_heads=3, engram_head_dim=32, engram_pad_token_id=2,
        engram_compressed_vocab_size=353,
    )  # fmt: skip
    return replace(preset("tiny"), **fields | changes)


def compressed_map(vectors: Path) -> np.ndarray:
    return token_map(vectors / "engram_tokenizer.json", vocab_size=512, expected_size=353)


def recorded_hash(recorded: Recorded, vectors: Path, case: str) -> EngramHash:
    ngram, heads, start, compressed, pad = recorded[f"engram.{case}.params"].tolist()
    config = engram_config(
        engram_layer_ids=tuple(recorded[f"engram.{case}.layer_ids"].tolist()),
        engram_num_embeddings=tuple(recorded[f"engram.{case}.num_embeddings"].tolist()),
        engram_max_ngram_size=ngram,
        engram_vocab_size=start,
        engram_n_heads=heads,
        engram_compressed_vocab_size=compressed,
        engram_pad_token_id=pad,
    )
    return engram_hash(config, int(compressed_map(vectors)[pad]))


def test_token_map_is_the_recorded_one(kernel_vectors: Recorded, vectors: Path) -> None:
    assert compressed_map(vectors).tolist() == kernel_vectors["engram.tokenizer.token_map"].tolist()
    assert int(kernel_vectors["engram.tokenizer.compressed_vocab"]) == 353


def test_token_maps_inside_the_models_are_the_recorded_ones(
    recorded: Callable[[str, str], Recorded], model_directory: Callable[[str], Path]
) -> None:
    for model in ("m3", "m7"):
        compressed = token_map(
            model_directory(model) / "tokenizer.json", vocab_size=512, expected_size=353
        )
        assert compressed.tolist() == recorded(model, "float32")["engram.token_map"].tolist()


@pytest.mark.parametrize("case", HASHES)
def test_primes_offsets_and_multipliers_are_the_recorded_ones(
    kernel_vectors: Recorded, vectors: Path, case: str
) -> None:
    constants = recorded_hash(kernel_vectors, vectors, case)
    for name in ("primes", "offsets", "multipliers"):
        assert getattr(constants, name).tolist() == kernel_vectors[f"engram.{case}.{name}"].tolist()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", HASHES)
def test_hash_rows_are_the_recorded_ones_at_once_and_in_every_split(
    kernel_vectors: Recorded, vectors: Path, case: str, masked: bool
) -> None:
    """Every two-way split carries the ids before it (regression class: n-gram history lost at a
    chunk boundary); image tokens hide everything behind them."""
    constants = recorded_hash(kernel_vectors, vectors, case)
    ids = kernel_vectors[f"engram.{case}.input_ids"]
    compressed = compressed_map(vectors)[ids.numpy()]
    if masked:
        # Images are recorded inside the first `prefill_len` tokens only.
        dead = ~kernel_vectors[f"engram.{case}.text_mask"].numpy()
        assert dead.any()
        compressed = np.where(dead, DEAD, compressed)
    expected = kernel_vectors[f"engram.{case}.ids_{'masked' if masked else 'text'}"]
    reach = constants.lookback
    for b, row in enumerate(compressed):
        padded = np.concatenate((np.full(reach, DEAD), row))
        assert constants.rows(padded).tolist() == expected[b].tolist()
        for cut in range(1, len(row)):
            pieces = [padded[: cut + reach], padded[cut:]]
            joined = np.concatenate([constants.rows(piece) for piece in pieces])
            assert joined.tolist() == expected[b].tolist(), f"split after {cut} tokens"


def released_hash() -> EngramHash:
    return engram_hash(preset("v4.1-flash"), 2)


def test_released_constants_are_the_recorded_ones(kernel_vectors: Recorded) -> None:
    constants = released_hash()
    for name in ("primes", "offsets", "multipliers"):
        assert (
            getattr(constants, name).tolist() == kernel_vectors[f"engram.released.{name}"].tolist()
        )


def test_released_constants_are_the_printed_ones() -> None:
    """Appendix A.2 of the architecture's specification, typed from the page."""
    constants = released_hash()
    flat = constants.primes.reshape(2, -1)
    assert flat[0, :4].tolist() == [16000057, 16000079, 16000081, 16000097]
    assert flat[1, -3:].tolist() == [16000877, 16000879, 16000889]
    assert flat.sum(axis=1).tolist() == [384006168, 384016682]
    assert constants.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


PRINTED = {
    (0, 0): (5702652, 121476532, 131476717, 257520185, 380066193),
    (0, 3): (3470735, 123745907, 134967535, 262928580, 379934983),
    (0, 5): (7957620, 126783432, 138481726, 261093168, 369052152),
    (1, 0): (14361964, 120604547, 132225184, 261362261, 372375971),
    (1, 3): (3894218, 126700282, 135776665, 256304053, 368107906),
    (1, 5): (3934507, 126296590, 137724930, 270632358, 369467829),
}


def test_released_hashes_are_the_printed_ones() -> None:
    """Position 5 sees a dead token at look-back 1, so look-backs 1 to 3 are padding."""
    ids = np.array([DEAD, DEAD, DEAD, 0, 10, 20, 30, DEAD, 40])
    rows = released_hash().rows(ids)
    for (layer, position), columns in PRINTED.items():
        assert tuple(rows[position, layer, [0, 7, 8, 16, 23]].tolist()) == columns


def test_a_dead_token_hides_everything_behind_it(vectors: Path, kernel_vectors: Recorded) -> None:
    constants = recorded_hash(kernel_vectors, vectors, "hash_a")
    behind = constants.rows(np.array([7, DEAD, 5, 9]))
    assert behind.tolist() == constants.rows(np.array([DEAD, DEAD, 5, 9])).tolist()
    assert behind.tolist() != constants.rows(np.array([7, 6, 5, 9])).tolist()


@pytest.mark.parametrize("case", ["gate_bf16", "gate_fp8"])
def test_gated_memory_matches_the_recorded_one(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    t = {
        n.rsplit(".", 1)[1]: v for n, v in kernel_vectors.items() if n.startswith(f"engram.{case}.")
    }
    config = engram_config(
        hidden_size=96, engram_num_embeddings=(304,),
        dense_dtype="fp8" if "wkv_scale" in t else "bf16",
    )  # fmt: skip
    engram = Engram(config, config.plan[0], ops)
    engram.embed.weight = nn.Parameter(t["table"], requires_grad=False)
    engram.embed.scale = nn.Parameter(t["table_scale"], requires_grad=False)
    engram.wkv.weight = nn.Parameter(t["wkv"], requires_grad=False)
    if "wkv_scale" in t:
        engram.wkv.scale = nn.Parameter(t["wkv_scale"], requires_grad=False)
    engram.q_weight, engram.k_weight = nn.Parameter(t["q_weight"]), nn.Parameter(t["k_weight"])
    hash_ids = t["hash_ids"].flatten(0, 1)
    assert_same_bits(engram.embed(hash_ids).to(torch.bfloat16), t["rows"].flatten(0, 1))
    with torch.inference_mode():
        out = engram(t["x"].flatten(0, 1), hash_ids.unsqueeze(1))
    assert_bf16(out, t["out"].flatten(0, 1), ulps=2)
