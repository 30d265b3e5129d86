"""Tokens, runs and state comparisons shared by the property tests. No tests here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.engine.loaded_model import LoadedModel


def tokens(model: LoadedModel, count: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids `[batch, count]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, count), generator=generator)


def prefill(model: LoadedModel, ids: Tensor, **options: Any) -> tuple[Tensor, ModelState]:
    """Logits and state after one prefill of `ids [B, T]`, with room for 64 more tokens."""
    state = model.new_state(ids.shape[1] + 64, batch=ids.shape[0])
    return model.prefill(ids, state, **options), state


def steps(model: LoadedModel, ids: Tensor, state: ModelState) -> Tensor:
    """Logits after each of the forced tokens `ids [B, n]`, `[B, n, V]`."""
    return torch.stack([model.step(ids[:, j], state) for j in range(ids.shape[1])], 1)


def global_rows(state: ModelState, slot: int = 0, count: int | None = None) -> dict[str, Tensor]:
    """Stored bytes of the rows and keys of one sequence, by owner.

    Args:
        count: of the first tokens only; None = all.
    """
    rows = {}
    length = state.slots[slot].length if count is None else count
    for spec in state.plan.kv_owners:
        numbers = torch.arange(length // spec.compress_ratio)
        sequence = torch.full_like(numbers, slot)
        where = state.pool.row_numbers(spec.layer_id, state.tables, sequence, numbers)
        rows[f"main {spec.layer_id}"] = state.pool.main[spec.layer_id][where]
        rows[f"index {spec.layer_id}"] = state.pool.index[spec.layer_id][where]
    return rows


def window_rows(state: ModelState, slot: int = 0) -> dict[int, Tensor]:
    """Ring bytes of one sequence by layer, oldest position first, as far as they are filled."""
    window, length = state.plan.sliding_window, state.slots[slot].encoder_length
    positions = torch.arange(max(0, length - window), length)
    return {
        spec.layer_id: state.rings[spec.layer_id, slot][positions % window]
        for spec in state.plan.layers
    }


def open_groups(state: ModelState, slot: int = 0) -> dict[str, Tensor]:
    """Live rows of the open groups of one sequence, by owner."""
    rows = {}
    for owner, carried in state.open_kv.items():
        live = state.slots[slot].length % state.plan[owner].compress_ratio
        rows[f"kv {owner}"] = carried[slot, :live]
        rows[f"gate {owner}"] = state.open_gate[owner][slot, :live]
    return rows


def everything(state: ModelState, slot: int = 0) -> dict[str, Tensor]:
    """All live rows of one sequence."""
    rings = {f"ring {layer}": ring for layer, ring in window_rows(state, slot).items()}
    return global_rows(state, slot) | rings | open_groups(state, slot)


def differences(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> list[Any]:
    """Names under which two sets of rows are not bit-equal."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def assert_same_state(left: ModelState, right: ModelState, slots: tuple[int, int] = (0, 0)) -> None:
    """Two sequences hold the same bytes everywhere a later call could look."""
    assert differences(everything(left, slots[0]), everything(right, slots[1])) == []
