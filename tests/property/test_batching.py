"""A sequence in a batch equals the same sequence alone. Bit for bit, with sums rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import assert_same_state, prefill, steps, tokens
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.model.spans import Spans

Exact = Callable[..., LoadedModel]
MODES = ("full", "report", "cut", "exact")


def alone(
    model: LoadedModel, ids: Tensor, after: Tensor, **options: object
) -> tuple[Tensor, ModelState]:
    """Logits of the prompt's last position and of forced tokens, and the state."""
    logits, state = prefill(model, ids.unsqueeze(0), **options)
    return torch.cat((logits.unsqueeze(1), steps(model, after.unsqueeze(0), state)), 1)[0], state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_prompts_of_unequal_length_equal_themselves_alone(
    exact: Exact, name: str, mode: str
) -> None:
    """Lengths 3, 8, 13 and 22: open groups at different phases, windows empty, full and wrapped
    (regression class: one start position for the whole batch)."""
    model = exact(name)
    ids = tokens(model, 30, batch=4)
    lengths = (3, 8, 13, 22)
    prompts = [ids[b, :n] for b, n in enumerate(lengths)]
    state = model.new_state(64, batch=4)
    logits = model.prefill(prompts, state, decoder_prefill=mode)
    after = torch.stack([ids[b, n : n + 4] for b, n in enumerate(lengths)])
    batched = torch.cat((logits.unsqueeze(1), steps(model, after, state)), 1)
    for b in range(4):
        expected, single = alone(model, prompts[b], after[b], decoder_prefill=mode)
        assert torch.equal(batched[b], expected), f"sequence {b}"
        assert_same_state(state, single, (b, 0))


def test_sequences_of_one_length_equal_themselves_alone_on_the_released_plan(exact: Exact) -> None:
    model = exact("tiny-40")
    ids = tokens(model, 14, batch=2)
    logits, state = prefill(model, ids[:, :12])
    after = steps(model, ids[:, 12:], state)
    for b in range(2):
        expected, single = alone(model, ids[b, :12], ids[b, 12:])
        assert torch.equal(torch.cat((logits[b : b + 1], after[b])), expected)
        assert_same_state(state, single, (b, 0))


@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    chunk_rows=st.sampled_from([1, 3, 8, 11, 2048]),
)
def test_any_lengths_and_any_chunk_budget_equal_the_runs_alone(
    exact: Exact, lengths: list[int], chunk_rows: int
) -> None:
    """The budget counts rows of all sequences together; a smaller one than the batch still works."""
    model = exact("tiny")
    ids = tokens(model, 24, batch=len(lengths), seed=7)
    prompts = [ids[b, :n] for b, n in enumerate(lengths)]
    state = model.new_state(32, batch=len(lengths))
    logits = model.prefill(prompts, state, chunk_rows=chunk_rows)
    for b, prompt in enumerate(prompts):
        expected, single = prefill(model, prompt.unsqueeze(0))
        assert torch.equal(logits[b : b + 1], expected)
        assert_same_state(state, single, (b, 0))


def test_more_sequences_than_the_chunk_budget_are_handled(exact: Exact) -> None:
    """Nine sequences and a budget of eight rows (regression class: buffers sized by a token budget
    that a call exceeds)."""
    model = exact("tiny")
    ids = tokens(model, 5, batch=9, seed=8)
    whole, _ = prefill(model, ids)
    tight, _ = prefill(model, ids, chunk_rows=8)
    assert torch.equal(tight, whole)


def test_a_new_sequence_without_any_compressed_row_next_to_a_longer_one(exact: Exact) -> None:
    """Alone, next to ten tokens, and a batch in which nobody has a row (regression class: the index
    kernel reads past zero-length rows)."""
    for name in ("tiny", "tiny-article"):
        model = exact(name)
        ids = tokens(model, 12, batch=2, seed=9)
        for lengths in ((1, 10), (1, 1)):
            state = model.new_state(32, batch=2)
            logits = model.prefill([ids[b, :n] for b, n in enumerate(lengths)], state)
            for b, n in enumerate(lengths):
                expected, _ = prefill(model, ids[b : b + 1, :n])
                assert torch.equal(logits[b : b + 1], expected)


def test_steps_of_some_slots_leave_the_others_alone(exact: Exact) -> None:
    """A step over slots 2 and 0, in that order, changes nothing in slot 1."""
    model = exact("tiny")
    ids = tokens(model, 16, batch=3, seed=10)
    prompts = [ids[b, :n] for b, n in enumerate((9, 6, 12))]
    state = model.new_state(32, batch=3)
    model.prefill(prompts, state)
    fed = torch.stack((ids[2, 12], ids[0, 9]))
    with torch.inference_mode():
        logits = model.net.logits(model.forward.step(fed, state, [2, 0], Account()))
    for row, slot, length in ((0, 2, 13), (1, 0, 10)):
        expected, single = prefill(model, ids[slot : slot + 1, :length])
        assert torch.equal(logits[row : row + 1], expected)
        assert_same_state(state, single, (slot, 0))
    _, untouched = prefill(model, prompts[1].unsqueeze(0))
    assert_same_state(state, untouched, (1, 0))


def test_a_sequence_may_join_while_another_is_decoding(exact: Exact) -> None:
    model = exact("tiny")
    ids = tokens(model, 20, batch=2, seed=11)
    state = model.new_state(32, batch=2)

    def read(slot: int, count: int) -> None:
        spans = Spans((slot,), (0,), (count,))
        pieces = [ids[slot, :count]]
        model.forward.read_chunk(pieces, state, spans, Account(), keep_boundary=None)

    with torch.inference_mode():
        read(0, 11)
        model.forward.step(ids[0, 11:12], state, [0], Account())
        read(1, 7)
        both = model.step(torch.stack((ids[0, 12], ids[1, 7])), state)
    for slot, length in ((0, 13), (1, 8)):
        expected, single = prefill(model, ids[slot : slot + 1, :length])
        assert torch.equal(both[slot : slot + 1], expected)
        assert_same_state(state, single, (slot, 0))


def test_two_states_of_one_model_and_two_models_do_not_touch(exact: Exact) -> None:
    """Nothing is kept outside the state: interleaved runs equal runs one after the other."""
    first, second = exact("tiny"), exact("tiny", seed=1)
    ids = tokens(first, 12, seed=12)
    expected = [steps(m, ids, m.new_state(16)) for m in (first, second)]
    states = [first.new_state(16), second.new_state(16), first.new_state(16)]
    models = (first, second, first)
    mixed: list[list[Tensor]] = [[], [], []]
    for j in range(12):
        for n, (model, state) in enumerate(zip(models, states, strict=True)):
            mixed[n].append(model.step(ids[:, j], state))
    for n, wanted in enumerate((expected[0], expected[1], expected[0])):
        assert torch.equal(torch.stack(mixed[n], 1), wanted)
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("model", ["m1", "m6"])
def test_a_batch_on_a_real_backend_equals_the_runs_alone(
    load_recorded: Exact, recorded: Callable[[str, str], dict[str, Tensor]], model: str
) -> None:
    """float32 sums of more rows have other last bits: equal to 1e-4 unless a code flipped, which
    moves a row by less than 0.1."""
    loaded = load_recorded(model, "float32")
    ids = recorded(model, "float32")["tokens"].long()[0]
    prompts = [ids[:37], ids[37:41], ids[60:77]]
    state = loaded.new_state(64, batch=3)
    logits = loaded.prefill(prompts, state)
    fed = torch.stack([ids[200], ids[201], ids[202]])
    after = loaded.step(fed, state)
    errors = []
    for b, prompt in enumerate(prompts):
        single, one = prefill(loaded, prompt.unsqueeze(0))
        errors.append((logits[b] - single[0]).abs().max())
        errors.append((after[b] - loaded.step(fed[b : b + 1], one)[0]).abs().max())
    worst = torch.stack(errors)
    assert worst.median() <= 1e-4
    assert worst.max() <= 0.1
