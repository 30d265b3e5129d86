"""Prefix hits: only global rows come back, windows are rebuilt, stored rows are never touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import (
    assert_same_state,
    differences,
    global_rows,
    prefill,
    steps,
    tokens,
    window_rows,
)
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import UsageError

Exact = Callable[..., LoadedModel]
WINDOW = 8
MODES = ("full", "report", "cut", "exact")
#: Even and odd prefixes, inside and on groups, with suffixes down to one token.
CUTS = [(40, 6), (39, 6), (41, 1), (38, 2), (33, 14)]


def hit_of(model: LoadedModel, ids: Tensor, length: int) -> ModelState:
    """A state that holds the global rows of the first `length` tokens, and nothing else."""
    _, stored = prefill(model, ids[:, :length], decoder_prefill="report")
    return stored.prefix(length)


def resume(
    model: LoadedModel, ids: Tensor, length: int, total: int, **options: object
) -> tuple[Tensor, ModelState]:
    state = hit_of(model, ids, length)
    suffix, prefix = ids[:, length:total], ids[:, :length]
    return model.prefill(suffix, state, prefix_ids=prefix, **options), state  # type: ignore[arg-type]


def test_a_prefix_holds_exactly_the_global_rows_of_its_tokens(exact: Exact) -> None:
    """No windows, no open groups, no boundary rows; one row less where a group is cut."""
    for name in ("tiny", "tiny-article"):
        model = exact(name)
        ids = tokens(model, 45)
        _, stored = prefill(model, ids)
        for length in (1, 3, 8, 17, 44, 45):
            hit = stored.prefix(length)
            assert differences(global_rows(hit), global_rows(stored, count=length)) == []
            assert hit.lengths == (length,)
            assert hit.kv_bytes() == hit.formats.kv_bytes(model.plan, length)
            assert not hit.rings.any()
            assert all(not rows.any() for rows in hit.open_kv.values())
            assert hit.slots[0].stash_stream is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("length", "new"), CUTS)
def test_exact_encoder_replay_equals_the_cold_run(
    exact: Exact, length: int, new: int, mode: str
) -> None:
    """Logits, rings, open groups and every row, for even and odd prefixes, in every mode."""
    model = exact("tiny")
    ids = tokens(model, length + new + 2)
    total = length + new
    expected, cold = prefill(model, ids[:, :total], decoder_prefill=mode)
    logits, state = resume(model, ids, length, total, encoder_replay="exact", decoder_prefill=mode)
    assert torch.equal(logits, expected)
    assert_same_state(state, cold)
    assert torch.equal(steps(model, ids[:, total:], state), steps(model, ids[:, total:], cold))


@pytest.mark.parametrize("length", [40, 41, 42, 43])
def test_exact_encoder_replay_equals_the_cold_run_at_ratio_four(exact: Exact, length: int) -> None:
    model = exact("tiny-article")
    ids = tokens(model, length + 5)
    expected, cold = prefill(model, ids, decoder_prefill="report")
    logits, state = resume(
        model, ids, length, length + 5, encoder_replay="exact", decoder_prefill="report"
    )
    assert torch.equal(logits, expected)
    assert_same_state(state, cold)


@pytest.mark.parametrize("replay", ["bounded", "exact"])
@pytest.mark.parametrize("length", [1, 2, 5, WINDOW - 1, WINDOW])
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_a_prefix_of_at_most_one_window_is_rebuilt_exactly(
    exact: Exact, name: str, length: int, replay: str
) -> None:
    """Nothing is cut off, so a bounded replay is exact as well."""
    model = exact(name)
    ids = tokens(model, 20, seed=1)
    expected, cold = prefill(model, ids, decoder_prefill="report")
    logits, state = resume(model, ids, length, 20, encoder_replay=replay, decoder_prefill="report")
    assert torch.equal(logits, expected)
    assert_same_state(state, cold)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("length", "new"), [*CUTS, (40, 0), (41, 0)])
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_replayed_tokens_leave_the_stored_rows_alone(
    exact: Exact, name: str, length: int, new: int, mode: str
) -> None:
    """Every byte below the hit, rows and keys, for even and odd hits; and nothing else of the pool
    is written than the rows of the suffix."""
    model = exact(name)
    ids = tokens(model, length + new, seed=2)
    hit = hit_of(model, ids, length)
    before = {owner: (hit.pool.main[owner].clone(), hit.pool.index[owner].clone())
              for owner in hit.pool.main}  # fmt: skip
    model.prefill(ids[:, length:], hit, prefix_ids=ids[:, :length], decoder_prefill=mode)
    for spec in model.plan.kv_owners:
        first, last = length // spec.compress_ratio, (length + new) // spec.compress_ratio
        for old, pool in zip(before[spec.layer_id], (hit.pool.main, hit.pool.index), strict=True):
            changed = (pool[spec.layer_id] != old).any(-1).nonzero().flatten().tolist()
            assert changed == list(range(first, last)), f"owner {spec.layer_id}"


@pytest.mark.parametrize("length", [40, 41])
def test_the_group_across_an_odd_hit_is_completed_by_the_suffix(exact: Exact, length: int) -> None:
    """An odd hit cuts a pair: its first half is computed again, so with exact replay the row of the
    pair is the cold one, and bounded replay still writes it."""
    model = exact("tiny")
    ids = tokens(model, length + 3, seed=3)
    _, cold = prefill(model, ids, decoder_prefill="report")
    _, state = resume(
        model, ids, length, length + 3, encoder_replay="exact", decoder_prefill="report"
    )
    assert differences(global_rows(state), global_rows(cold)) == []
    _, bounded = resume(model, ids, length, length + 3, decoder_prefill="report")
    pair = length // 2
    for owner in (1, 3):
        assert bounded.pool.main[owner][pair].any()
        # Layer 1 reads the exact output of layer 0 for the last replayed token: its row is cold.
        same = torch.equal(bounded.pool.main[owner][pair], cold.pool.main[owner][pair])
        assert same == (owner == 1)


def test_which_window_rows_a_bounded_encoder_replay_restores_exactly(exact: Exact) -> None:
    """Layer 0 all replayed rows, layer 1 only the newest of the prefix, layer 2 none: each layer
    sees one truncated window more."""
    for name in ("tiny", "tiny-40"):
        model = exact(name)
        ids = tokens(model, 40, seed=4)
        _, cold = prefill(model, ids, decoder_prefill="report")
        _, state = resume(model, ids, 40, 40, decoder_prefill="report")
        rings, wanted = window_rows(state), window_rows(cold)
        exact_rows = [
            int((rings[layer] == wanted[layer]).all(-1).sum())
            for layer in range(min(4, model.plan.num_encoder_layers))
        ]
        assert exact_rows == [WINDOW, 1, 0, 0]
        assert bool((rings[1][-1] == wanted[1][-1]).all())


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_more_replayed_windows_restore_more_rows(exact: Exact, windows: int) -> None:
    model = exact("tiny")
    ids = tokens(model, 48, seed=5)
    _, cold = prefill(model, ids, decoder_prefill="report")
    _, state = resume(model, ids, 48, 48, encoder_replay_windows=windows, decoder_prefill="report")
    rings, wanted = window_rows(state), window_rows(cold)
    counts = [int((rings[layer] == wanted[layer]).all(-1).sum()) for layer in range(4)]
    expected = [min(WINDOW, max(0, windows * WINDOW - j * (WINDOW - 1))) for j in range(4)]
    assert counts == expected


def test_the_whole_prompt_can_be_the_prefix(exact: Exact) -> None:
    """Nothing new to read: the replayed rows give the first logits."""
    model = exact("tiny")
    ids = tokens(model, 46, seed=6)
    for replay in ("bounded", "exact"):
        expected, cold = prefill(model, ids[:, :44], decoder_prefill="report")
        logits, state = resume(model, ids, 44, 44, encoder_replay=replay, decoder_prefill="report")
        if replay == "exact":
            assert torch.equal(logits, expected)
            assert_same_state(state, cold)
        else:
            assert torch.isfinite(logits).all()
            assert not torch.equal(logits, expected)
        assert model.step(ids[:, 44], state).shape == logits.shape


def test_the_replay_runs_the_rows_it_says(exact: Exact) -> None:
    """Bounded: one window and the suffix. Exact: one window per encoder layer more, never more
    than the prefix (regression class: the wrong number of tokens recomputed)."""
    model = exact("tiny")
    ids = tokens(model, 60, seed=7)
    for length, new, replay, expected in (
        (50, 6, "bounded", WINDOW + 6),
        (50, 6, "exact", 4 * (WINDOW - 1) + (WINDOW - 6) + 6),
        (50, 10, "exact", 4 * (WINDOW - 1) + 1 + 10),
        (12, 20, "exact", 12 + 20),
    ):
        account = Account()
        resume(
            model, ids, length, length + new, encoder_replay=replay, decoder_prefill="report",
            account=account,
        )  # fmt: skip
        assert account.encode.tokens == expected
        assert account.replay.tokens == WINDOW


@pytest.mark.parametrize("chunk_rows", [1, 3, 9])
def test_a_resumed_prefill_in_chunks_equals_one_shot(exact: Exact, chunk_rows: int) -> None:
    model = exact("tiny")
    ids = tokens(model, 47, seed=8)
    for mode in ("full", "report"):
        expected, whole = resume(model, ids, 41, 47, decoder_prefill=mode)
        logits, state = resume(model, ids, 41, 47, decoder_prefill=mode, chunk_rows=chunk_rows)
        assert torch.equal(logits, expected)
        assert_same_state(state, whole)


def test_resumed_sequences_of_a_batch_equal_themselves_alone(exact: Exact) -> None:
    model = exact("tiny")
    ids = tokens(model, 46, batch=2, seed=9)
    _, stored = prefill(model, ids[:, :40], decoder_prefill="report")
    suffixes = [ids[0, 40:43], ids[1, 40:46]]
    state = stored.prefix(40)
    logits = model.prefill(suffixes, state, prefix_ids=ids[:, :40], decoder_prefill="report")
    for b, suffix in enumerate(suffixes):
        total = 40 + len(suffix)
        expected, single = resume(model, ids[b : b + 1], 40, total, decoder_prefill="report")
        assert torch.equal(logits[b : b + 1], expected)
        assert_same_state(state, single, (b, 0))


def test_a_replay_looks_back_for_engram_to_the_true_tokens(
    exact_recorded: Callable[[str], LoadedModel],
) -> None:
    """The first replayed token hashes the three ids before it, which do not run again."""
    model = exact_recorded("m3")
    ids = tokens(model, 60, seed=10)
    full: dict[str, Any] = {"decoder_prefill": "full"}
    _, before = prefill(model, ids[:, :50], **full)
    state = before.prefix(50)
    model.prefill(ids[:, 50:50], state, prefix_ids=ids[:, :50], **full)
    # Layer 0 is exact for the window that ran again; behind the Engram of layer 1, the newest token
    # is too, and only if its look-back was the true one.
    rings, wanted = window_rows(state), window_rows(before)
    assert torch.equal(rings[0], wanted[0])
    assert torch.equal(rings[1][-1], wanted[1][-1])
    assert not torch.equal(rings[2][-1], wanted[2][-1])
    expected, cold = prefill(model, ids, **full)
    state = before.prefix(50)
    logits = model.prefill(
        ids[:, 50:], state, prefix_ids=ids[:, :50], encoder_replay="exact", **full
    )
    assert torch.equal(logits, expected)
    assert_same_state(state, cold)


def test_a_hit_may_be_taken_from_a_state_that_went_on(exact: Exact) -> None:
    """A prefix of a longer sequence is the prefix of a shorter one: rows are append-only."""
    model = exact("tiny")
    ids = tokens(model, 50, seed=11)
    _, longer = prefill(model, ids, decoder_prefill="report")
    steps(model, ids[:, :3], longer)
    for length in (20, 21):
        shorter = hit_of(model, ids, length)
        assert differences(global_rows(longer.prefix(length)), global_rows(shorter)) == []


def test_calls_after_a_hit_are_checked(exact: Exact) -> None:
    model = exact("tiny")
    ids = tokens(model, 30)
    _, stored = prefill(model, ids)
    for length in (0, 31):
        with pytest.raises(
            UsageError, match=rf"prefix\({length}\) is not possible: .* allowed 1..30"
        ):
            stored.prefix(length)
    hit = stored.prefix(20)
    with pytest.raises(UsageError, match="holds a restored prefix without windows; call prefill"):
        model.step(ids[:, 20], hit)
    message = "sequence 0 was restored with 20 prefix tokens; pass exactly those as prefix_ids"
    for prefix in (None, ids[:, :19], ids[:, :21]):
        with pytest.raises(UsageError, match=message):
            model.prefill(ids[:, 20:], hit, prefix_ids=prefix)
    with pytest.raises(UsageError, match="prefix_ids holds 2 sequences for a state of 1"):
        model.prefill(ids[:, 20:], hit, prefix_ids=ids[:, :20].repeat(2, 1))
    with pytest.raises(UsageError, match="prefix_ids was given but sequence 0 holds no restored"):
        model.prefill(ids, model.new_state(64), prefix_ids=ids[:, :20])
    with pytest.raises(UsageError, match="encoder_replay='half' is not a choice; allowed: bounded"):
        model.prefill(ids[:, 20:], hit, prefix_ids=ids[:, :20], encoder_replay="half")  # type: ignore[arg-type]
