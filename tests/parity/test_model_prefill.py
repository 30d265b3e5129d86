"""Recorded models, prefill: logits, selections and candidate pools, uncached and cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bounds import MODELS, assert_logits, assert_selections, case_file
from closeness import row_errors
from torch import Tensor

from cedar.engine.loaded_model import LoadedModel
from cedar.kernels.reference_index import pool_mask, positions_of
from cedar.model.spans import Spans

Recording = Callable[[str, str], dict[str, Tensor]]
Loader = Callable[..., LoadedModel]
DTYPES = ("float32", "bfloat16")
LENGTHS = (1, 2, 3, 7, 31, 128, 129, 200, 300)


def lengths_of(directory: Path) -> list[int]:
    lengths = case_file(directory)["prefill_lengths"]
    assert set(lengths) <= set(LENGTHS)
    return sorted(lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_uncached_logits_match_at_every_recorded_length(
    load_recorded: Loader, recorded: Recording, model_directory: Callable[[str], Path], model: str,
    dtype: str,
) -> None:  # fmt: skip
    loaded, golden, directory = (
        load_recorded(model, dtype),
        recorded(model, dtype),
        model_directory(model),
    )
    compared = 0
    for length in lengths_of(directory):
        logits = loaded.score(golden["tokens"][:, :length].long())
        for name, part in (
            ("last", logits[:, -1]), ("logits", logits), ("tail", logits[:, -32:]),
        ):  # fmt: skip
            if f"prefill.{length}.{name}" in golden:
                expected = golden[f"prefill.{length}.{name}"]
                assert_logits(directory, dtype, f"prefill.{length}.{name}", part, expected)
                compared += 1
    assert compared == sum(
        name.startswith("prefill.") and name.endswith((".last", ".logits", ".tail"))
        for name in golden
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_cached_prefill_gives_the_recorded_next_token_logits(
    load_recorded: Loader, recorded: Recording, model_directory: Callable[[str], Path], model: str,
    dtype: str,
) -> None:  # fmt: skip
    loaded, golden, directory = (
        load_recorded(model, dtype),
        recorded(model, dtype),
        model_directory(model),
    )
    for length in lengths_of(directory):
        state = loaded.new_state(length)
        logits = loaded.prefill(golden["tokens"][:, :length].long(), state)
        name = f"prefill.{length}.last"
        assert_logits(directory, dtype, name, logits, golden[name])


@pytest.mark.parametrize("model", ["m1", "m3"])
def test_a_prefill_in_chunks_gives_the_recorded_logits(
    load_recorded: Loader, recorded: Recording, model: str
) -> None:
    """Chunks of one token, of odd sizes and around the window of 16, on every backend.

    Sums of fewer rows have other last bits, and one flipped FP4 code moves these logits by 0.04;
    a wrong window or group moves them by 0.3 and in every chunking. Bit-exact chunking is tested
    with exact sums elsewhere.
    """
    loaded, golden = load_recorded(model, "float32"), recorded(model, "float32")
    errors = []
    for chunk_rows in (1, 2, 3, 7, 15, 16, 17):
        state = loaded.new_state(129)
        logits = loaded.prefill(golden["tokens"][:, :129].long(), state, chunk_rows=chunk_rows)
        errors.append(row_errors(logits, golden["prefill.129.last"]))
    assert torch.cat(errors).median() <= 5e-3
    assert torch.cat(errors).max() <= 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_selections_and_pools_of_an_uncached_prefill_match(
    load_recorded: Loader, recorded: Recording, model: str, dtype: str
) -> None:
    loaded, golden = load_recorded(model, dtype), recorded(model, dtype)
    ids = golden["tokens"][:, :129].long()
    dense = loaded.dense_rows(1, 129)
    engram = loaded.forward.engram
    with torch.inference_mode():
        loaded.net.forward_dense(ids, dense, None if engram is None else engram.rows((), ids[0]))
    topk = loaded.plan.index_topk
    selections = {layer: positions_of(mask[0], topk) for layer, mask in dense.selections.items()}
    assert dense.candidates is not None
    check_selections(model, dtype, golden, selections, dense.candidates[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_selections_and_pools_of_a_cached_prefill_match(
    load_recorded: Loader, recorded: Recording, watch_rows: Callable, model: str, dtype: str
) -> None:  # type: ignore[type-arg]
    loaded, golden = load_recorded(model, dtype), recorded(model, dtype)
    with watch_rows(loaded) as calls:
        loaded.prefill(golden["tokens"][:, :129].long(), loaded.new_state(129))
    (rows,) = calls
    every = Spans((0,), (0,), (129,))
    assert all(spans == every for spans, _ in rows.selections.values())
    selections = {layer: kept.positions for layer, (_, kept) in rows.selections.items()}
    ((_, pool),) = rows.pools.values()
    check_selections(model, dtype, golden, selections, pool_mask(pool.blocks, pool.block_size, 129))


def check_selections(
    model: str, dtype: str, golden: dict[str, Tensor], selections: dict[int, Tensor], pool: Tensor
) -> None:
    names = {f"prefill.129.topk.{layer}" for layer in selections}
    assert names == {name for name in golden if name.startswith("prefill.129.topk.")}
    for layer, rows in selections.items():
        gaps = golden[f"prefill.129.topk_gap.{layer}"][0]
        assert_selections(model, dtype, rows, golden[f"prefill.129.topk.{layer}"][0], gaps)
    same = (pool == golden["prefill.129.candidates"][0]).all(-1)
    clear = golden["prefill.129.candidate_gap"][0] > 1e-6
    if dtype == "float32":
        allowed = 12 if model in ("m2", "m7") else 0
        assert int((~same & clear).sum()) <= allowed
    else:
        # Block scores are maxima of bfloat16 scores: more stable than single positions.
        assert same.float().mean() >= 0.7
