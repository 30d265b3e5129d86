"""A cached prefix is taken block by block, replayed within bounds, and never changes exact output."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cedar import LLM, SamplingParams
from cedar.config.presets import preset
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.request import Request
from cedar.errors import UsageError
from cedar.kernels.backends import select_operators
from cedar.loading import from_config, load

BLOCK = 8
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("preset:tiny", dtype="float32")


def engine_of(model: LoadedModel, **options: object) -> LLM:
    fields = {"max_model_len": 256, "max_num_seqs": 2, "block_size": BLOCK} | options
    return LLM(model, enable_prefix_caching=True, **fields)


def run(llm: LLM, prompt: list[int], **fields: object) -> tuple[list[int], Request]:
    request = llm.engine.add_request(f"r{random.random()}", prompt, PARAMS, **fields)
    while llm.engine.has_work:
        llm.engine.step()
    return request.output_ids, request


def cold(model: LoadedModel, prompt: list[int]) -> list[int]:
    llm = LLM(model, max_model_len=256, max_num_seqs=1, block_size=BLOCK)
    return llm.generate([prompt], PARAMS)[0].outputs[0].token_ids


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 64) for _ in range(length)]


def test_the_second_identical_prompt_hits_and_in_exact_mode_says_the_same(
    model: LoadedModel,
) -> None:
    prompt = prompt_of(40)
    llm = engine_of(model, encoder_replay="exact")
    first, missed = run(llm, prompt)
    second, hit = run(llm, prompt)
    assert missed.cached_tokens == 0
    assert missed.miss_reason == "no block of this prompt is cached"
    assert hit.cached_tokens == 40
    assert hit.miss_reason is None
    assert first == second == cold(model, prompt)


def test_a_bounded_hit_runs_one_window_of_the_prefix_again(model: LoadedModel) -> None:
    prompt = prompt_of(100)
    llm = engine_of(model)
    run(llm, prompt)
    before = llm.engine.account.encode.tokens
    # Where one prompt leaves another there are no windows.
    _, hit = run(llm, [*prompt[:80], *prompt_of(9, seed=1)])
    assert hit.cached_tokens == 80
    window = model.plan.sliding_window
    assert llm.engine.account.encode.tokens - before == window + 9


@pytest.mark.parametrize("window", [2, 4, 8])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_whatever_block_and_window_every_full_block_that_was_kept_is_taken(
    block_size: int, window: int
) -> None:
    config = replace(preset("tiny"), sliding_window=window)
    model = from_config(config, ops=select_operators("auto"), dtype=torch.float32)
    llm = engine_of(model, block_size=block_size, encoder_replay="exact")
    prompt = prompt_of(3 * 8)
    first, _ = run(llm, prompt)
    for length in (len(prompt), len(prompt) - 1):
        _, hit = run(llm, prompt[:length])
        assert hit.cached_tokens == length // block_size * block_size
    assert run(llm, prompt)[0] == first


def test_prompts_that_share_two_and_a_half_blocks_share_exactly_two(model: LoadedModel) -> None:
    shared = prompt_of(20)
    llm = engine_of(model)
    run(llm, shared + prompt_of(20, seed=1))
    _, hit = run(llm, shared + prompt_of(20, seed=2))
    assert hit.cached_tokens == 16


def test_a_match_no_longer_than_the_window_is_reported_but_not_taken(model: LoadedModel) -> None:
    llm = engine_of(model)
    run(llm, [*prompt_of(8), 5])
    _, short = run(llm, [*prompt_of(8), 6])
    assert (short.matched_tokens, short.cached_tokens) == (8, 0)
    assert short.miss_reason is not None
    assert "not longer than the window of 8" in short.miss_reason


@pytest.mark.parametrize("length", [2, 6, 8, 10, 14, 20])
def test_only_a_match_longer_than_the_window_is_taken_and_then_exactly(
    model: LoadedModel, length: int
) -> None:
    llm = engine_of(model, block_size=2, encoder_replay="exact")
    run(llm, prompt_of(length))
    longer = [*prompt_of(length), *prompt_of(5, seed=7)]
    text, hit = run(llm, longer)
    assert hit.matched_tokens == length
    assert hit.cached_tokens == (length if length > model.plan.sliding_window else 0)
    assert text == cold(model, longer)


def test_generated_tokens_are_reused_by_the_next_turn(model: LoadedModel) -> None:
    prompt = prompt_of(30)
    llm = engine_of(model, encoder_replay="exact")
    answer, _ = run(llm, prompt)
    follow_up = [*prompt, *answer, *prompt_of(5, seed=3)]
    text, hit = run(llm, follow_up)
    assert hit.cached_tokens == 32
    assert text == cold(model, follow_up)


def test_a_salt_separates_tenants(model: LoadedModel) -> None:
    llm = engine_of(model)
    run(llm, prompt_of(40), cache_salt=b"a")
    _, other = run(llm, prompt_of(40), cache_salt=b"b")
    assert other.cached_tokens == 0


def test_rows_computed_after_a_bounded_replay_are_refused_by_exact_mode(model: LoadedModel) -> None:
    base, longer = prompt_of(96), prompt_of(96) + prompt_of(64, seed=4)
    llm = engine_of(model)
    run(llm, base)
    llm.engine.windows.forget_all()
    _, hit = run(llm, longer)
    assert hit.depth == 1
    blocks = [llm.engine.pool.lookup(key) for key in hit.keys]
    depths = [llm.engine.pool.depth_of(block) for block in blocks if block is not None]
    assert depths[:12] == [0] * 12
    assert set(depths[12:]) == {1}
    assert len(llm.engine.pool.longest_prefix(hit.keys, max_depth=0)) == 12


def test_replay_never_overwrites_cached_rows(model: LoadedModel) -> None:
    prompt = prompt_of(96)
    llm = engine_of(model)
    _, first = run(llm, prompt)
    blocks = [llm.engine.pool.lookup(key) for key in first.keys]
    pool = llm.engine.runner.state.pool
    numbers = torch.tensor([block for block in blocks if block is not None])

    def stored() -> list[torch.Tensor]:
        return [
            buffer.view(-1, pool.rows_per_block[owner], buffer.shape[1])[numbers].clone()
            for owner in pool.main
            for buffer in (pool.main[owner], pool.index[owner])
        ]

    before = stored()
    run(llm, prompt + prompt_of(30, seed=5))
    assert all(torch.equal(a, b) for a, b in zip(before, stored(), strict=True))


def test_losing_one_middle_block_leaves_the_prefix_before_it(model: LoadedModel) -> None:
    prompt = prompt_of(64)
    llm = engine_of(model, num_blocks=40)
    _, first = run(llm, prompt)
    lost = llm.engine.pool.lookup(first.keys[5])
    assert lost is not None
    llm.engine.pool._withdraw(lost)
    _, hit = run(llm, prompt)
    assert hit.cached_tokens == 5 * BLOCK


def test_a_full_pool_evicts_and_still_finishes_every_request(model: LoadedModel) -> None:
    llm = engine_of(model, num_blocks=32)
    for seed in range(12):
        out, _ = run(llm, prompt_of(100, seed=seed))
        assert len(out) == 8
        llm.engine.pool.check_integrity()
    assert llm.engine.pool.num_free == 32


def test_an_unknown_replay_mode_is_refused(model: LoadedModel) -> None:
    with pytest.raises(
        UsageError, match="encoder_replay='never' is not a choice; allowed: bounded"
    ):
        engine_of(model, encoder_replay="never")
