"""With stored windows a prefix goes on without a replay, bit for bit as if it had never stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import window_runs
from window_runs import BLOCK, WINDOW, Exact, prompt_of, rows_of, run, run_with_aborts

from cedar import LLM
from cedar.cache.store_format import RecordKind
from cedar.config.presets import preset
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import UsageError


def engine_of(model: LoadedModel, store: Path | None, **fields: object) -> Engine:
    if store is not None:
        fields = {"prefix_store_dir": str(store), "prefix_store_windows": True} | fields
    return window_runs.engine_of(model, **fields)


def records(engine: Engine, kind: RecordKind) -> list[int]:
    """Where the stored records of a kind end, in tokens."""
    assert engine.tier is not None
    assert engine.tier.writer.flush(30)
    return sorted(i.start + i.tokens for i in engine.tier.store.ls() if i.kind == kind)


@pytest.mark.parametrize(
    ("name", "mode", "replay"),
    [
        *(("tiny", mode, "bounded") for mode in ("report", "cut", "exact", "full")),
        ("tiny", "report", "exact"),
        ("tiny", "full", "exact"),
        ("tiny-article", "report", "bounded"),
    ],
)
def test_a_follow_up_after_a_restart_runs_its_new_tokens_only_and_equals_the_cold_run(
    exact: Exact, tmp_path: Path, name: str, mode: str, replay: str
) -> None:
    model = exact(name)
    fields = {"decoder_prefill": mode, "encoder_replay": replay}
    first = engine_of(model, tmp_path, **fields)
    turn = run(first, prompt_of(60))
    assert records(first, RecordKind.WINDOW)[-1] == 64  # 60 + 7 tokens were fed
    first.close()
    follow_up = [*turn.prompt_ids, *turn.output_ids, *prompt_of(40, 1)]
    second, cold = engine_of(model, tmp_path, **fields), engine_of(model, None, **fields)
    hit, expected = run(second, follow_up), run(cold, follow_up)
    assert (hit.cached_tokens, hit.disk_tokens, hit.replayed_tokens, hit.depth) == (64, 64, 0, 0)
    assert second.account.encode.tokens == len(follow_up) - 64
    assert hit.output_ids == expected.output_ids
    assert rows_of(second, hit) == rows_of(cold, expected)
    assert len(rows_of(cold, expected)) == (len(follow_up) + 7) // BLOCK
    assert torch.equal(second.runner.state.rings, cold.runner.state.rings)
    second.close()


@pytest.mark.parametrize("mode", ["report", "full"])
def test_the_same_prompt_goes_on_from_where_it_leaves_the_decoder_its_tail(
    exact: Exact, tmp_path: Path, mode: str
) -> None:
    model, prompt = exact("tiny"), prompt_of(60)
    first = engine_of(model, tmp_path, decoder_prefill=mode)
    expected = run(first, prompt)
    at = 56 if mode == "full" else 48
    assert records(first, RecordKind.WINDOW) == [at, 64]
    first.close()
    second = engine_of(model, tmp_path, decoder_prefill=mode)
    hit = run(second, prompt)
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (56, 56 - at, 0)
    assert hit.output_ids == expected.output_ids
    # Both are there: nothing is stored twice.
    assert records(second, RecordKind.WINDOW) == [at, 64]
    second.close()


@pytest.mark.parametrize(("block_size", "window"), [(2, 2), (2, 8), (4, 4), (8, 2)])
def test_whatever_block_and_window_the_state_that_a_prompt_leaves_is_one_it_can_use(
    exact: Exact, tmp_path: Path, block_size: int, window: int
) -> None:
    model = exact(replace(preset("tiny"), sliding_window=window))
    prompt = prompt_of(37)
    first = engine_of(model, tmp_path, block_size=block_size)
    expected = run(first, prompt)
    first.close()
    second = engine_of(model, tmp_path, block_size=block_size)
    hit = run(second, prompt)
    at = (len(prompt) - window) // block_size * block_size
    assert (hit.replayed_tokens, hit.depth) == (hit.cached_tokens - at, 0)
    assert hit.output_ids == expected.output_ids
    second.close()


def test_without_its_windows_a_prefix_is_still_taken_whole_and_replayed(
    exact: Exact, tmp_path: Path
) -> None:
    model, prompt = exact("tiny"), prompt_of(60)
    first = engine_of(model, tmp_path)
    run(first, prompt)
    assert first.tier is not None
    assert records(first, RecordKind.WINDOW) == [48, 64]
    stored = [i for i in first.tier.store.ls() if i.kind == RecordKind.WINDOW]
    assert first.tier.store.delete([i.key for i in stored], RecordKind.WINDOW) == 2
    first.close()
    second = engine_of(model, tmp_path)
    hit = run(second, prompt)
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (56, WINDOW, 1)
    second.close()


def test_windows_that_are_not_full_are_not_stored(exact: Exact, tmp_path: Path) -> None:
    # A shorter prompt would leave rows of whoever had the slot before.
    engine = engine_of(exact("tiny"), tmp_path, block_size=2)
    engine.runner.state.rings.fill_(7)
    run(engine, prompt_of(13))
    assert records(engine, RecordKind.WINDOW) == [20]
    engine.close()


def test_two_window_states_a_turn_take_their_rows_and_nothing_else(
    exact: Exact, tmp_path: Path
) -> None:
    model = exact("tiny")
    engine = engine_of(model, tmp_path)
    prompt: list[int] = []
    for turn in range(3):
        done = run(engine, [*prompt, *prompt_of(45, turn)])
        prompt = [*done.prompt_ids, *done.output_ids]
    assert len(records(engine, RecordKind.WINDOW)) == 6
    assert engine.tier is not None
    state, formats = engine.runner.state, engine.runner.state.formats
    encoder = model.plan.num_encoder_layers * WINDOW * formats.window.row_bytes
    for info in engine.tier.store.ls():
        size = encoder if info.kind == RecordKind.WINDOW else state.pool.block_bytes
        assert info.payload_bytes == size
    engine.close()


def test_windows_without_a_store_are_refused() -> None:
    with pytest.raises(UsageError, match="has no effect without a store"):
        LLM("preset:tiny", prefix_store_windows=True)


def test_a_small_pool_with_aborts_and_preemptions_never_changes_an_answer_or_keeps_a_block(
    exact: Exact, tmp_path: Path
) -> None:
    model, draw = exact("tiny"), random.Random(3)
    heads = [prompt_of(40, seed) for seed in range(3)]
    prompts = [[*draw.choice(heads), *prompt_of(draw.randrange(1, 40), i)] for i in range(9)]
    plain = engine_of(model, None, enable_prefix_caching=False)
    expected = [run(plain, prompt).output_ids for prompt in prompts]
    engine = engine_of(model, tmp_path, num_blocks=16, max_num_seqs=3, encoder_replay="exact")
    for _ in range(2):
        requests = run_with_aborts(engine, prompts, expected, draw)
        assert engine.pool.num_free == 16
        assert engine.tier is not None
        assert engine.tier.writer.flush(30)
        engine.pool.forget_all()
    assert sum(request.preemptions for request in requests) > 0
    assert sum(request.disk_tokens for request in requests) > 0
    engine.close()
