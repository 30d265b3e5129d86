"""Ways to prefill: all equal for prompts of one window, exact equals full, report and cut are exact
where the dependency argument says so and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sequences import (
    assert_same_state,
    differences,
    global_rows,
    open_groups,
    prefill,
    steps,
    tokens,
    window_rows,
)
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel

Exact = Callable[..., LoadedModel]
MODES = ("report", "cut", "exact")
WINDOW = 8


SHORT = [("tiny", n) for n in (1, 2, 5, WINDOW - 1, WINDOW)]
SHORT += [("tiny-article", n) for n in (3, WINDOW)] + [("tiny-40", WINDOW)]


@pytest.mark.parametrize(("name", "length"), SHORT)
def test_every_mode_is_full_bit_for_bit_up_to_one_window(
    exact: Exact, name: str, length: int
) -> None:
    model = exact(name)
    ids = tokens(model, length + 1)
    expected, full = prefill(model, ids[:, :length], decoder_prefill="full")
    after = model.step(ids[:, length], full)
    for mode in MODES:
        logits, state = prefill(model, ids[:, :length], decoder_prefill=mode)
        assert torch.equal(logits, expected), mode
        assert torch.equal(model.step(ids[:, length], state), after), mode
        assert_same_state(state, full)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_full_up_to_one_window_on_a_real_backend(
    load_recorded: Exact, recorded: Callable[[str, str], dict[str, Tensor]], mode: str
) -> None:
    """Same rows, same kernels, same order: equal to the last bit without any help."""
    for model, dtype in (("m1", "float32"), ("m1", "bfloat16"), ("m2", "bfloat16")):
        loaded = load_recorded(model, dtype)
        ids = recorded(model, dtype)["tokens"].long()
        for length in (1, 7, 16):
            expected, full = prefill(loaded, ids[:, :length])
            logits, state = prefill(loaded, ids[:, :length], decoder_prefill=mode)
            assert torch.equal(logits, expected)
            assert_same_state(state, full)


@pytest.mark.parametrize(("name", "length"), [("tiny", 61), ("tiny-article", 60)])
def test_exact_equals_full_in_logits_rings_and_what_follows(
    exact: Exact, name: str, length: int
) -> None:
    model = exact(name)
    ids = tokens(model, length + 3)
    expected, full = prefill(model, ids[:, :length], decoder_prefill="full")
    logits, state = prefill(model, ids[:, :length], decoder_prefill="exact")
    assert torch.equal(logits, expected)
    assert_same_state(state, full)
    assert torch.equal(steps(model, ids[:, length:], state), steps(model, ids[:, length:], full))


def test_exact_runs_fewer_rows_than_full_once_the_prompt_is_longer(exact: Exact) -> None:
    model = exact("tiny")
    ids = tokens(model, 61)
    counts = {}
    for mode in ("full", *MODES):
        account = Account()
        prefill(model, ids, decoder_prefill=mode, account=account)
        assert account.encode.token_layers == 61 * 4
        assert (account.project.tokens, account.project.layers) == (61, 1)
        counts[mode] = account.replay.token_layers
    assert counts == {
        "full": 61 * 4, "report": 8 * 4, "cut": 15 + 3 * 8, "exact": 29 + 22 + 15 + 8,
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tiny", "tiny-article", "tiny-40"])
def test_global_rows_do_not_depend_on_the_mode(exact: Exact, name: str, mode: str) -> None:
    """Neither do encoder windows, open groups, nor any of it on how the prompt was cut."""
    model = exact(name)
    length = 21 if name == "tiny-40" else 37
    ids = tokens(model, length)
    _, full = prefill(model, ids, decoder_prefill="full")
    for chunk_rows in (5, 2048):
        _, state = prefill(model, ids, decoder_prefill=mode, chunk_rows=chunk_rows)
        assert differences(global_rows(state), global_rows(full)) == []
        assert differences(open_groups(state), open_groups(full)) == []
        rings, wanted = window_rows(state), window_rows(full)
        for layer in range(model.plan.num_encoder_layers):
            assert torch.equal(rings[layer], wanted[layer])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_global_rows_do_not_depend_on_the_mode_on_a_real_backend(
    load_recorded: Exact, recorded: Callable[[str, str], dict[str, Tensor]], dtype: str
) -> None:
    for model in ("m1", "m2"):
        loaded = load_recorded(model, dtype)
        ids = recorded(model, dtype)["tokens"].long()[:, :77]
        _, full = prefill(loaded, ids, decoder_prefill="full")
        for mode in MODES:
            _, state = prefill(loaded, ids, decoder_prefill=mode)
            assert differences(global_rows(state), global_rows(full)) == []


def exact_tail(model: LoadedModel, state: ModelState, full: ModelState) -> list[int]:
    """Per decoder layer, how many window rows, counted from the newest, equal those of `full`."""
    rings, wanted = window_rows(state), window_rows(full)
    counts = []
    for spec in model.plan.decoder:
        equal = (rings[spec.layer_id] == wanted[spec.layer_id]).all(-1).flip(0).tolist()
        counts.append(equal.index(False) if False in equal else len(equal))
    return counts


PATTERNS = [("tiny", 45, 1), ("tiny", 45, 2), ("tiny", 45, 3), ("tiny-article", 44, 1),
            ("tiny-article", 44, 2), ("tiny-40", 45, 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "length", "windows"), PATTERNS)
def test_which_window_rows_of_a_replay_are_exact(
    exact: Exact, name: str, length: int, windows: int
) -> None:
    """Per decoder layer j above the first, each truncated window costs one window less one row.

    report: all rows of the first decoder layer, one of the next, none above (one window replayed).
    cut: one layer later. More windows push the edge up by a window each.
    """
    model = exact(name)
    ids = tokens(model, length)
    _, full = prefill(model, ids, decoder_prefill="full")
    layers = range(len(model.plan.decoder))

    def expected(shift: int) -> list[int]:
        rows = [windows * WINDOW - max(0, j - shift) * (WINDOW - 1) for j in layers]
        return [min(WINDOW, max(0, count)) for count in rows]

    _, report = prefill(model, ids, decoder_prefill="report", replay_windows=windows)
    assert exact_tail(model, report, full) == expected(0)
    _, cut = prefill(model, ids, decoder_prefill="cut", replay_windows=windows)
    assert exact_tail(model, cut, full) == expected(1)


def test_one_window_of_report_and_cut_is_the_printed_pattern(exact: Exact) -> None:
    """The table of the architecture's specification, section 8.4, for its plan of 40 layers."""
    model = exact("tiny-40")
    ids = tokens(model, 31, seed=3)
    full_logits, full = prefill(model, ids)
    report_logits, report = prefill(model, ids, decoder_prefill="report")
    cut_logits, cut = prefill(model, ids, decoder_prefill="cut")
    assert exact_tail(model, report, full) == [WINDOW, 1] + [0] * 18
    assert exact_tail(model, cut, full) == [WINDOW, WINDOW, 1] + [0] * 17
    assert not torch.equal(report_logits, full_logits)
    assert not torch.equal(cut_logits, full_logits)
    assert not torch.equal(cut_logits, report_logits)


def test_selections_and_pools_of_replayed_rows_are_exact_in_the_first_decoder_layer(
    exact: Exact, watch_rows: Callable
) -> None:  # type: ignore[type-arg]
    """Layer 20 selects from exact streams; Reindex layers above it see approximate ones."""
    model = exact("tiny-40")
    ids = tokens(model, 45, seed=4)
    with watch_rows(model) as calls:
        prefill(model, ids, decoder_prefill="full")
        prefill(model, ids, decoder_prefill="report")
    full, _, replay = calls
    spans, selection = replay.selections[20]
    assert spans.starts == (45 - WINDOW,)
    tail = full.selections[20][1].positions[-WINDOW:]
    assert torch.equal(selection.positions, tail)
    assert torch.equal(replay.pools[20][1].blocks, full.pools[20][1].blocks[-WINDOW:])
    later = [24, 28, 32, 36]
    assert any(
        not torch.equal(
            replay.selections[i][1].positions, full.selections[i][1].positions[-WINDOW:]
        )
        for i in later
    )


@pytest.mark.parametrize("mode", ["report", "cut"])
def test_enough_windows_make_a_replay_exact(exact: Exact, mode: str) -> None:
    """The dial between one window and exact: at least layers * (window - 1) + 1 rows."""
    model = exact("tiny")
    ids = tokens(model, 61)
    expected, full = prefill(model, ids)
    needed = -(-(len(model.plan.decoder) * (WINDOW - 1) + 1) // WINDOW)
    logits, state = prefill(model, ids, decoder_prefill=mode, replay_windows=needed)
    assert torch.equal(logits, expected)
    assert_same_state(state, full)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_a_replay_is_a_function_of_the_prompt_not_of_its_pieces(
    exact: Exact, name: str, mode: str
) -> None:
    """Chunks and several calls leave the same logits, rings and rows as one shot."""
    model = exact(name)
    ids = tokens(model, 43, seed=5)
    expected, one_shot = prefill(model, ids, decoder_prefill=mode)
    for pieces in ([43], [20, 23], [30, 9, 4], [41, 1, 1]):
        for chunk_rows in (3, 2048):
            state, start = model.new_state(64), 0
            for count in pieces:
                logits = model.prefill(
                    ids[:, start : start + count],
                    state,
                    decoder_prefill=mode,
                    chunk_rows=chunk_rows,
                )
                start += count
            assert torch.equal(logits, expected), (pieces, chunk_rows)
            assert_same_state(state, one_shot)


def test_new_tokens_after_decode_steps_go_on_from_the_rings(exact: Exact) -> None:
    """A short second prompt after generated tokens: its rows run through the decoder exactly."""
    model = exact("tiny")
    ids = tokens(model, 40, seed=6)
    expected = model.score(ids)[:, -1]
    for mode in ("full", *MODES):
        state = model.new_state(64)
        model.prefill(ids[:, :30], state)
        steps(model, ids[:, 30:36], state)
        logits = model.prefill(ids[:, 36:], state, decoder_prefill=mode)
        assert torch.equal(logits, expected), mode


def test_rows_from_before_a_full_call_are_never_replayed(exact: Exact) -> None:
    """report, full, then a short report: it must go on from the rings, not join the boundary rows
    of the first call to those of the third."""
    model = exact("tiny")
    ids = tokens(model, 25, seed=7)
    logits = []
    for modes in (("full", "report"), ("full", "full"), ("full", "cut"), ("full", "exact")):
        state = model.new_state(32)
        model.prefill(ids[:, :20], state, decoder_prefill="report")
        model.prefill(ids[:, 20:23], state, decoder_prefill=modes[0])
        logits.append(model.prefill(ids[:, 23:], state, decoder_prefill=modes[1]))
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


def test_a_wider_mode_after_a_narrow_one_goes_on_from_the_rings(exact: Exact) -> None:
    """The first call kept one window of boundary rows; cut and exact would need more of them."""
    model = exact("tiny")
    ids = tokens(model, 25, seed=8)

    def second(mode: str) -> Tensor:
        state = model.new_state(32)
        model.prefill(ids[:, :20], state, decoder_prefill="report")
        return model.prefill(ids[:, 20:22], state, decoder_prefill=mode)

    assert torch.equal(second("cut"), second("full"))
    assert torch.equal(second("exact"), second("full"))
