"""Windows kept in memory: a hit goes on from them bit for bit as if it had never stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from window_runs import (
    BLOCK,
    PARAMS,
    WINDOW,
    Exact,
    engine_of,
    prompt_of,
    rows_of,
    run,
    run_with_aborts,
)

from cedar.cache.window_cache import WindowCache, Windows
from cedar.config.presets import preset
from cedar.errors import UsageError

MODES = [
    *(
        ("tiny", mode, replay)
        for mode in ("report", "cut", "full")
        for replay in ("bounded", "exact")
    ),
    ("tiny-article", "report", "bounded"),
]


@pytest.mark.parametrize("length", [57, 60, 63, 64, 65])
@pytest.mark.parametrize(("name", "mode", "replay"), MODES)
def test_the_same_prompt_runs_what_lies_behind_its_last_block_only_and_says_the_same(
    exact: Exact, name: str, mode: str, replay: str, length: int
) -> None:
    model, prompt = exact(name), prompt_of(length)
    engine = engine_of(model, decoder_prefill=mode, encoder_replay=replay)
    cold = run(engine, prompt)
    before, rings = engine.account.encode.tokens, engine.runner.state.rings.clone()
    hit = run(engine, prompt)
    at = (length - 1) // BLOCK * BLOCK
    assert engine.account.encode.tokens - before == length - at
    assert (hit.cached_tokens - hit.replayed_tokens, hit.depth) == (at, 0)
    assert hit.output_ids == cold.output_ids
    assert torch.equal(engine.runner.state.rings, rings)


@pytest.mark.parametrize("suffix", [8, 9, 40])
@pytest.mark.parametrize(("name", "mode", "replay"), MODES)
def test_a_follow_up_runs_its_new_tokens_only_and_equals_the_cold_run(
    exact: Exact, name: str, mode: str, replay: str, suffix: int
) -> None:
    model = exact(name)
    fields = {"decoder_prefill": mode, "encoder_replay": replay}
    warm, cold = engine_of(model, **fields), engine_of(model, **fields)
    turn = run(warm, prompt_of(60))
    follow_up = [*turn.prompt_ids, *turn.output_ids, *prompt_of(suffix, 1)]
    tail = 1 if mode == "full" else 2 * WINDOW - 1 if mode == "cut" else WINDOW
    before = warm.account.encode.tokens
    hit, expected = run(warm, follow_up), run(cold, follow_up)
    if len(follow_up) - 64 >= tail:
        assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (64, 0, 0)
        assert warm.account.encode.tokens - before == len(follow_up) - 64
    if hit.depth == 0:
        assert hit.output_ids == expected.output_ids
        assert rows_of(warm, hit) == rows_of(cold, expected)


def test_where_the_decoder_replays_a_pyramid_the_windows_lie_before_it(exact: Exact) -> None:
    model, prompt = exact("tiny"), prompt_of(100)
    engine = engine_of(model, decoder_prefill="exact", encoder_replay="exact")
    cold, hit = run(engine, prompt), run(engine, prompt)
    # 8 + 3 * 7 rows go through the first decoder layer: 100 - 29 = 71.
    assert (hit.cached_tokens, hit.cached_tokens - hit.replayed_tokens) == (96, 64)
    assert {w.boundary_rows for _, w in engine.windows._kept.values()} == {0}
    assert hit.output_ids == cold.output_ids


@pytest.mark.parametrize(("block_size", "window"), [(2, 2), (2, 8), (4, 4), (8, 2), (16, 8)])
@pytest.mark.parametrize("windows", [1, 2])
def test_whatever_block_and_window_a_hit_goes_on_from_the_last_block_end(
    exact: Exact, block_size: int, window: int, windows: int
) -> None:
    model = exact(replace(preset("tiny"), sliding_window=window))
    engine = engine_of(model, block_size=block_size, replay_windows=windows)
    cold, hit = run(engine, prompt_of(37)), run(engine, prompt_of(37))
    at = 36 // block_size * block_size
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (at, 0, 0)
    assert hit.output_ids == cold.output_ids


def test_windows_are_not_found_under_another_salt_or_without_their_blocks(exact: Exact) -> None:
    engine = engine_of(exact("tiny"))
    run(engine, prompt_of(60), salt=b"a")
    assert run(engine, prompt_of(60), salt=b"b").cached_tokens == 0
    engine.pool.forget_all()
    assert len(engine.windows) == 4
    again = run(engine, prompt_of(60), salt=b"a")
    assert (again.cached_tokens, again.read - len(prompt_of(60))) == (0, 0)


def test_windows_serve_again_when_their_blocks_were_lost_and_computed_anew(exact: Exact) -> None:
    engine = engine_of(exact("tiny"))
    run(engine, prompt_of(60))
    engine.pool.forget_all()
    longer = run(engine, prompt_of(60) + prompt_of(30, 1))
    assert longer.cached_tokens == 0
    hit = run(engine, prompt_of(60))
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (56, 0, 0)


def test_a_prefix_whose_windows_were_dropped_is_replayed(exact: Exact) -> None:
    engine = engine_of(exact("tiny"), max_num_seqs=1)
    run(engine, prompt_of(60))
    for seed in (1, 2):
        run(engine, prompt_of(60, seed))
    assert len(engine.windows) == 2
    hit = run(engine, prompt_of(60))
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (56, WINDOW, 1)
    assert run(engine, prompt_of(60)).replayed_tokens == 0


def test_windows_after_a_bounded_replay_carry_its_depth(exact: Exact) -> None:
    engine = engine_of(exact("tiny"))
    run(engine, prompt_of(60))
    engine.windows.forget_all()
    replayed = run(engine, prompt_of(60) + prompt_of(30, 1))
    assert replayed.depth == 1
    hit = run(engine, prompt_of(60) + prompt_of(30, 1))
    assert (hit.replayed_tokens, hit.depth) == (0, 1)
    assert hit.output_ids == replayed.output_ids


def test_windows_farther_back_than_the_replay_are_left_alone(exact: Exact) -> None:
    engine = engine_of(exact("tiny"))
    first = run(engine, prompt_of(60))
    follow_up = [*first.prompt_ids, *first.output_ids, *prompt_of(60, 1)]
    far = first.keys[64 // BLOCK - 1]
    found = engine.windows.get(far)
    assert found is not None
    run(engine, follow_up)
    engine.windows.forget_all()
    engine.windows.put(far, *found)
    hit = run(engine, follow_up)
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (128, WINDOW, 1)


def test_a_prompt_that_was_scored_leaves_windows_that_only_a_longer_prompt_uses(
    exact: Exact,
) -> None:
    # Its rows went through the decoder, so none is left between encoder and decoder.
    model = exact("tiny")
    engine = engine_of(model)
    run(engine, prompt_of(60), params=replace(PARAMS, prompt_logprobs=1))
    longer = prompt_of(60) + prompt_of(9, 1)
    hit = run(engine, longer)
    assert (hit.cached_tokens, hit.replayed_tokens, hit.depth) == (56, 0, 0)
    assert hit.output_ids == run(engine_of(model), longer).output_ids
    same = run(engine, prompt_of(60))
    assert (same.cached_tokens, same.replayed_tokens, same.depth) == (56, WINDOW, 1)


def test_without_prefix_caching_no_windows_are_kept_and_no_chunk_is_cut(exact: Exact) -> None:
    engine = engine_of(exact("tiny"), enable_prefix_caching=False)
    engine.add_request("r", prompt_of(60), PARAMS)
    engine.step()
    assert engine.account.encode.tokens == 60
    while engine.has_work:
        engine.step()
    assert (len(engine.windows), engine.windows.nbytes) == (0, 0)


def test_kept_windows_take_the_bytes_of_the_ledger(exact: Exact) -> None:
    model = exact("tiny")
    engine = engine_of(model)
    run(engine, prompt_of(60))
    state, config = engine.runner.state, model.config
    rings = model.plan.num_encoder_layers * WINDOW * state.formats.window.row_bytes
    row = config.hc_mult * (config.hidden_size * model.net.dtype.itemsize + 4)
    assert len(engine.windows) == 2  # of the prompt and of the answer
    assert engine.windows.nbytes == 2 * rings + WINDOW * row


def test_the_store_gets_no_windows_unless_it_is_asked_to(exact: Exact, tmp_path: Path) -> None:
    engine = engine_of(exact("tiny"), prefix_store_dir=str(tmp_path))
    run(engine, prompt_of(60))
    assert engine.tier is not None
    assert engine.tier.writer.flush(30)
    assert engine.tier.stats().records == 8
    assert len(engine.windows) == 2
    engine.close()


def test_a_small_pool_with_aborts_and_preemptions_never_changes_an_answer(exact: Exact) -> None:
    model, draw = exact("tiny"), random.Random(3)
    heads = [prompt_of(40, seed) for seed in range(3)]
    distinct = [[*head, *prompt_of(draw.randrange(1, 40), i)] for i, head in enumerate(heads)]
    prompts = distinct * 3
    plain = engine_of(model, enable_prefix_caching=False)
    expected = [run(plain, prompt).output_ids for prompt in prompts]
    engine = engine_of(model, num_blocks=18, max_num_seqs=3, encoder_replay="exact")
    went_on = preempted = 0
    for _ in range(4):
        for request in run_with_aborts(engine, prompts, expected, draw):
            went_on += bool(request.cached_tokens) and request.replayed_tokens == 0
            preempted += request.preemptions
        assert len(engine.windows) <= 6
        assert engine.windows.nbytes == sum(w.nbytes for _, w in engine.windows._kept.values())
    assert went_on > 0
    assert preempted > 0


def test_the_least_recently_used_windows_leave_first() -> None:
    cache = WindowCache(2)
    for key in (b"a", b"b"):
        cache.put(key, 0, Windows(key))
    cache.touch(b"a")
    cache.put(b"c", 0, Windows(b"four"))
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert cache.nbytes == 5


def test_windows_of_a_smaller_depth_then_with_more_boundary_rows_replace_the_others() -> None:
    cache, rows = WindowCache(2), torch.zeros(3, 2)
    cache.put(b"k", 1, Windows(b"deep", rows, rows))
    cache.put(b"k", 0, Windows(b"flat"))
    cache.put(b"k", 1, Windows(b"deep", rows, rows))
    found = cache.get(b"k", max_depth=0)
    assert found is not None and found[1].rings == b"flat"
    cache.put(b"k", 0, Windows(b"rows", rows, rows))
    cache.put(b"k", 0, Windows(b"flat"))
    found = cache.get(b"k")
    assert found is not None and found[1].rings == b"rows"
    assert cache.nbytes == 4 + 2 * rows.nbytes
    cache.put(b"d", 2, Windows(b"d"))
    assert cache.get(b"d", max_depth=1) is None


def test_a_cache_for_no_windows_is_refused() -> None:
    with pytest.raises(UsageError, match="capacity=0 must be at least 1"):
        WindowCache(0)
