"""Cached equals uncached, and every way of cutting a prompt equals one shot. Bit for bit.

Sums are rounded once (exact_operators.py), so equality is asked for everywhere: logits, and every
stored row, ring and open group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from exact_operators import with_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import assert_same_state, prefill, steps, tokens
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.config.presets import preset
from cedar.engine.loaded_model import LoadedModel

Exact = Callable[..., LoadedModel]
#: Ratios 0, 2 and 1; ratio 4 and boundary projections; all 40 layers; ratios without common factor.
PLANS = ("tiny", "tiny-article", "tiny-40", "ratios 3 and 2")
WINDOW = 8


def planned(exact: Exact, name: str) -> LoadedModel:
    if name == "ratios 3 and 2":
        return exact(replace(preset("tiny"), compress_ratios=(0, 3, 3, 2, 1, 1, 1, 1)))
    return exact(name)


@pytest.mark.parametrize("name", PLANS)
def test_cached_decode_equals_the_uncached_oracle_at_every_position(
    exact: Exact, name: str
) -> None:
    model = planned(exact, name)
    ids = tokens(model, 34)
    oracle = model.score(ids)
    logits, state = prefill(model, ids[:, :21])
    assert torch.equal(logits, oracle[:, 20])
    assert torch.equal(steps(model, ids[:, 21:], state), oracle[:, 21:])


def test_prefill_then_one_step_equals_a_prefill_of_both(exact: Exact) -> None:
    """n tokens against n - 1 and a step, for n around every window and group edge (regression
    class: the single-token path computes something else)."""
    model = exact("tiny")
    ids = tokens(model, 20, seed=1)
    for n in range(2, 21):
        whole, state = prefill(model, ids[:, :n])
        _, shorter = prefill(model, ids[:, : n - 1])
        assert torch.equal(model.step(ids[:, n - 1], shorter), whole)
        assert_same_state(shorter, state)


CHUNKS = (1, 2, 3, 7, WINDOW - 1, WINDOW, WINDOW + 1)
CASES = [(name, chunk) for name in PLANS if name != "tiny-40" for chunk in CHUNKS]
CASES += [("tiny-40", 3), ("tiny-40", WINDOW)]


@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_chunks_of_one_size_equal_one_shot(exact: Exact, name: str, chunk: int) -> None:
    model = planned(exact, name)
    length = 19 if name == "tiny-40" else 29
    ids = tokens(model, length + 2)
    logits, state = prefill(model, ids[:, :length])
    chunked, other = prefill(model, ids[:, :length], chunk_rows=chunk)
    assert torch.equal(chunked, logits)
    assert_same_state(other, state)
    after = [steps(model, ids[:, length:], s) for s in (state, other)]
    assert torch.equal(*after)


def run_pieces(
    model: LoadedModel, ids: Tensor, sizes: list[int], decode: set[int]
) -> tuple[Tensor, ModelState]:
    """Feed pieces of the given sizes; pieces of one token in `decode` go through `step`."""
    state = model.new_state(ids.shape[1] + 8)
    logits = None
    for n, (start, end) in enumerate(pairwise([0, *accumulate(sizes)])):
        piece = ids[:, start:end]
        if end - start == 1 and n in decode:
            logits = model.step(piece[:, 0], state)
        else:
            logits = model.prefill(piece, state)
    assert logits is not None
    return logits, state


@settings(max_examples=12)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 2, 3, 7, 8, 9, 13]), min_size=2, max_size=7),
    decode=st.sets(st.integers(1, 6)),
)
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_any_mix_of_prefill_calls_and_steps_equals_one_shot(
    exact: Exact, name: str, sizes: list[int], decode: set[int]
) -> None:
    """Cuts fall inside groups, on window edges and between single tokens."""
    model = exact(name)
    ids = tokens(model, sum(sizes), seed=2)
    logits, state = run_pieces(model, ids, sizes, decode)
    whole, one_shot = prefill(model, ids)
    assert torch.equal(logits, whole)
    assert_same_state(state, one_shot)


@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_every_two_way_split_equals_one_shot(exact: Exact, name: str) -> None:
    """Twelve tokens cut anywhere, also where the first piece completes no group at all (regression
    class: a fully masked row turns to NaN)."""
    model = exact(name)
    ids = tokens(model, 12, seed=3)
    whole, one_shot = prefill(model, ids)
    assert torch.isfinite(whole).all()
    for cut in range(1, 12):
        logits, state = run_pieces(model, ids, [cut, 12 - cut], set())
        assert torch.equal(logits, whole), f"cut after {cut}"
        assert_same_state(state, one_shot)


@pytest.mark.parametrize("start", [12, 13, 14, 15])
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_blocks_of_one_to_nine_tokens_equal_single_steps(
    exact: Exact, name: str, start: int
) -> None:
    """From every phase of a group (regression class: compressed rows written for at most four
    tokens of a block)."""
    model = exact(name)
    ids = tokens(model, start + 9, seed=4)
    _, single = prefill(model, ids[:, :start])
    for count in range(1, 10):
        logits = model.step(ids[:, start + count - 1], single)
        _, block = prefill(model, ids[:, :start])
        assert torch.equal(model.prefill(ids[:, start : start + count], block), logits)
        assert_same_state(block, single)


def test_engram_history_is_carried_over_every_cut(
    exact_recorded: Callable[[str], LoadedModel],
) -> None:
    """Ten tokens in every two-way split: look-back reaches into the piece before (regression class:
    n-gram history lost at the first tokens of a chunk)."""
    model = exact_recorded("m3")
    ids = tokens(model, 12, seed=5)
    oracle = model.score(ids)
    for cut in range(1, 10):
        logits, state = run_pieces(model, ids[:, :10], [cut, 10 - cut], set())
        assert torch.equal(logits, oracle[:, 9]), f"cut after {cut}"
        assert torch.equal(steps(model, ids[:, 10:], state), oracle[:, 10:])


def test_engram_model_starts_with_a_single_token(
    exact_recorded: Callable[[str], LoadedModel],
) -> None:
    """The very first call of a model may be one token, in a prefill or a step, without any warm-up
    (regression class: hash buffers sized before the first call)."""
    loaded = exact_recorded("m3")
    weights, engram = dict(loaded.net.state_dict()), loaded.forward.engram
    ids = tokens(loaded, 6, seed=6)
    oracle = loaded.score(ids)
    fresh = with_weights(loaded.config, weights, engram=engram)
    state = fresh.new_state(8)
    assert torch.equal(fresh.prefill(ids[:, :1], state), oracle[:, 0])
    assert torch.equal(steps(fresh, ids[:, 1:], state), oracle[:, 1:])
    fresh = with_weights(loaded.config, weights, engram=engram)
    assert torch.equal(steps(fresh, ids, fresh.new_state(8)), oracle)
