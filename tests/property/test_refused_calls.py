"""Calls that cannot be honoured are refused by name and leave the state as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sequences import assert_same_state, prefill, tokens

from cedar.cache.kv_pool import KVPool
from cedar.config.presets import preset
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import DoesNotFitError, RequestError, UsageError
from cedar.formats.rows import RowFormats

Exact = Callable[..., LoadedModel]


@pytest.fixture
def model(exact: Exact) -> LoadedModel:
    return exact("tiny")


def test_ids_outside_the_vocabulary_are_named(model: LoadedModel) -> None:
    for bad in (-1, 64):
        with pytest.raises(
            RequestError, match=rf"token id {bad} is not in the vocabulary; allowed 0..63"
        ):
            model.prefill(torch.tensor([[1, bad]]), model.new_state(8))
        with pytest.raises(RequestError) as error:
            model.score(torch.tensor([[bad]]))
        assert error.value.param == "ids"


def test_ids_of_another_shape_or_kind_are_refused(model: LoadedModel) -> None:
    state = model.new_state(8)
    with pytest.raises(UsageError, match=r"ids must be \[batch, tokens\], got shape \[3\]"):
        model.prefill(torch.tensor([1, 2, 3]), state)
    with pytest.raises(UsageError, match=r"ids must be integers, got torch.float32"):
        model.prefill(torch.tensor([[1.5]]), state)
    with pytest.raises(RequestError, match="prefill needs at least one token per sequence"):
        model.prefill(torch.zeros(1, 0, dtype=torch.int64), state)
    with pytest.raises(RequestError, match="score needs at least one token per sequence"):
        model.score(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(UsageError, match="score needs sequences of one length"):
        model.score([torch.tensor([1]), torch.tensor([1, 2])])  # type: ignore[arg-type]


def test_another_number_of_sequences_than_the_state_is_refused(model: LoadedModel) -> None:
    state = model.new_state(8, batch=2)
    with pytest.raises(UsageError, match="prefill got 1 sequences for a state of 2"):
        model.prefill(torch.tensor([[1]]), state)
    with pytest.raises(UsageError, match=r"step needs one token per sequence, 2, got \[1\]"):
        model.step(torch.tensor([1]), state)


def test_options_are_checked_before_anything_runs(model: LoadedModel) -> None:
    ids = tokens(model, 5)
    state = model.new_state(8)
    refusals = [
        ({"decoder_prefill": "most"}, "decoder_prefill='most' is not a choice; allowed: full"),
        ({"replay_windows": 2}, "replay_windows=2 has no effect with decoder_prefill='full'"),
        ({"chunk_rows": 0}, "chunk_rows=0 must be at least 1"),
    ]
    for options, message in refusals:
        with pytest.raises(UsageError, match=message):
            model.prefill(ids, state, **options)
    assert state.lengths == (0,)
    assert not state.rings.any()


def test_a_state_needs_room(model: LoadedModel) -> None:
    for arguments, message in (
        ((0,), "max_tokens=0 must be at least 1"),
        ((8, 0), "batch=0 must be at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            model.new_state(*arguments)


def test_tokens_beyond_the_room_are_refused_with_need_and_limit(model: LoadedModel) -> None:
    """A prompt, a block after decode steps, or one more step: refused at the door, never an
    out-of-range slice, and what was stored stays."""
    state = model.new_state(8)
    room = state.max_tokens
    ids = tokens(model, room + 9)
    with pytest.raises(
        DoesNotFitError,
        match=rf"sequence 0 would hold {room + 1} tokens \(0 stored \+ {room + 1} new\) but its state "
        rf"has room for {room}; create it with new_state\(max_tokens={room + 1}\)",
    ):
        model.prefill(ids[:, : room + 1], state)
    model.prefill(ids[:, : room - 4], state, decoder_prefill="report")
    _, other = prefill(model, ids[:, : room - 4], decoder_prefill="report")
    with pytest.raises(DoesNotFitError, match=rf"would hold {room + 5} tokens \({room - 4} stored"):
        model.prefill(ids[:, room - 4 : room + 5], state)
    assert_same_state(state, other)
    for position in range(room - 4, room):
        model.step(ids[:, position], state)
    with pytest.raises(DoesNotFitError, match=rf"would hold {room + 1} tokens"):
        model.step(ids[:, room], state)


@pytest.mark.parametrize("size", [0, 3, -2])
def test_a_block_never_cuts_a_group(size: int) -> None:
    config = preset("tiny")
    message = f"block_size={size} must be a positive multiple of 2, the least common multiple"
    with pytest.raises(UsageError, match=message):
        KVPool(config.plan, RowFormats.of(config), num_blocks=1, block_size=size)


def test_bytes_in_use_follow_the_tokens_stored(model: LoadedModel) -> None:
    ids = tokens(model, 21, batch=2)
    state = model.new_state(32, batch=2)
    model.prefill([ids[0, :13], ids[1, :1]], state)
    formats = RowFormats.of(model.config)
    expected = formats.kv_bytes(model.plan, 13) + formats.kv_bytes(model.plan, 1)
    assert state.kv_bytes() == expected
    assert state.window_bytes() == 2 * formats.window_bytes(model.plan)
    model.step(ids[:, 20], state)
    grown = formats.kv_bytes(model.plan, 14) + formats.kv_bytes(model.plan, 2)
    assert state.kv_bytes() == grown
