"""Which keys an index source scores: its own owner's (corrected), or those published last (as
shipped). The two differ exactly in decode steps that complete no group of an owner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sequences import assert_same_state, prefill, steps, tokens

from cedar.engine.loaded_model import LoadedModel
from cedar.kernels.operators import Selection

Exact = Callable[..., LoadedModel]


def test_the_corrected_rule_is_the_default_and_named(exact: Exact) -> None:
    assert exact("tiny").index_key_rule == "corrected"
    assert exact("tiny", index_key_rule="as_shipped").index_key_rule == "as_shipped"


def test_corrected_decode_equals_the_uncached_run_at_every_step(exact: Exact) -> None:
    """Nine steps from even and odd prompts."""
    model = exact("tiny")
    ids = tokens(model, 40)
    oracle = model.score(ids)
    for length in (30, 31):
        _, state = prefill(model, ids[:, :length])
        after = steps(model, ids[:, length : length + 9], state)
        assert torch.equal(after, oracle[:, length : length + 9])


@pytest.mark.parametrize("name", ["tiny", "tiny-40"])
def test_the_rules_differ_only_where_no_group_closes(exact: Exact, name: str) -> None:
    """A step at an odd position completes the ratio-2 groups: equal. At an even position the
    ratio-2 sources would score the last decoder owner's keys: different."""
    corrected, shipped = exact(name), exact(name, index_key_rule="as_shipped")
    ids = tokens(corrected, 30, seed=2)
    for length in range(24, 28):
        expected, state = prefill(corrected, ids[:, :length])
        logits, other = prefill(shipped, ids[:, :length])
        # The reference program's prefill runs owners and sources in order: no stale keys.
        assert torch.equal(logits, expected)
        same = torch.equal(
            corrected.step(ids[:, length], state), shipped.step(ids[:, length], other)
        )
        assert same == (length % 2 == 1), f"step at position {length}"


def test_stale_keys_change_the_selection_of_ratio_two_sources_only(
    exact: Exact, watch_rows: Callable
) -> None:  # type: ignore[type-arg]
    corrected, shipped = exact("tiny"), exact("tiny", index_key_rule="as_shipped")
    ids = tokens(corrected, 30, seed=3)

    def chosen(model: LoadedModel) -> dict[int, Selection]:
        _, state = prefill(model, ids[:, :24])
        with watch_rows(model) as calls:
            model.step(ids[:, 24], state)
        return {layer: kept for layer, (_, kept) in calls[0].selections.items()}

    mine, theirs = chosen(corrected), chosen(shipped)
    assert mine.keys() == theirs.keys() == {1, 3, 4, 6}
    assert not torch.equal(mine[1].positions, theirs[1].positions)
    assert (theirs[1].positions < 12).all(), "positions keep the range of the layer's own rows"


def test_the_rules_agree_while_everything_is_selected(exact: Exact) -> None:
    """Up to index_topk compressed rows there is nothing to choose, whatever the keys: in tiny, four
    rows of the ratio-1 owner, so four tokens."""
    corrected, shipped = exact("tiny"), exact("tiny", index_key_rule="as_shipped")
    ids = tokens(corrected, 4, seed=4)
    states = [m.new_state(8) for m in (corrected, shipped)]
    for j in range(4):
        left, right = (
            m.step(ids[:, j], s) for m, s in zip((corrected, shipped), states, strict=True)
        )
        assert torch.equal(left, right)


def test_reading_a_prompt_is_the_same_under_both_rules(exact: Exact) -> None:
    """In one piece, in chunks of one token, and after a prefix hit: only decode steps differ."""
    corrected, shipped = exact("tiny"), exact("tiny", index_key_rule="as_shipped")
    ids = tokens(corrected, 30, seed=7)
    for mode in ("full", "report"):
        expected, state = prefill(corrected, ids, decoder_prefill=mode)
        for chunk_rows in (1, 7, 2048):
            logits, other = prefill(shipped, ids, decoder_prefill=mode, chunk_rows=chunk_rows)
            assert torch.equal(logits, expected)
            assert_same_state(other, state)
    results = []
    for model in (corrected, shipped):
        _, stored = prefill(model, ids[:, :24])
        hit = stored.prefix(24)
        results.append(model.prefill(ids[:, 24:], hit, prefix_ids=ids[:, :24]))
        results.append(model.step(ids[:, 0], hit))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[1], results[3])


def test_each_sequence_of_a_batch_has_its_own_published_keys(exact: Exact) -> None:
    model = exact("tiny", index_key_rule="as_shipped")
    ids = tokens(model, 30, batch=2, seed=5)
    prompts = [ids[0, :24], ids[1, :17]]
    state = model.new_state(40, batch=2)
    model.prefill(prompts, state)
    both = model.step(torch.stack((ids[0, 24], ids[1, 17])), state)
    for b, prompt in enumerate(prompts):
        _, single = prefill(model, prompt.unsqueeze(0))
        alone = model.step(ids[b, len(prompt)].unsqueeze(0), single)
        assert torch.equal(both[b : b + 1], alone)


def test_decode_from_an_empty_state_scores_nothing_stale(exact: Exact) -> None:
    """The very first step has published no key at all."""
    model = exact("tiny", index_key_rule="as_shipped")
    ids = tokens(model, 3, seed=6)
    out = steps(model, ids, model.new_state(8))
    assert torch.isfinite(out).all()
