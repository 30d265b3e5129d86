"""Phase arithmetic: which rows run where in a prefill and after a prefix hit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cedar.config.layer_plan import LayerPlan
from cedar.config.presets import preset
from cedar.engine.phases import (
    boundary_rows,
    check_decoder_prefill,
    encoder_replay_rows,
    replay_rows,
)
from cedar.errors import UsageError


def rows(plan: LayerPlan, mode: str, windows: int = 1) -> list[tuple[int, int]]:
    return [(step.write, step.query) for step in replay_rows(plan, mode, windows)]  # type: ignore[arg-type]


def test_report_replays_one_window_in_every_decoder_layer() -> None:
    assert rows(preset("v4.1-flash").plan, "report") == [(128, 128)] * 19 + [(128, 1)]


def test_cut_writes_the_windows_its_first_queries_see() -> None:
    assert rows(preset("v4.1-flash").plan, "cut") == [(255, 128)] + [(128, 128)] * 18 + [(128, 1)]


def test_exact_is_the_printed_pyramid() -> None:
    """2,541 rows written in layer 20 and 2,414 of its outputs; each later layer 127 fewer."""
    steps = rows(preset("v4.1-flash").plan, "exact")
    assert steps[0] == (2541, 2414)
    assert [write for write, _ in steps] == [128 + (19 - j) * 127 for j in range(20)]
    assert steps[-1] == (128, 1)


@pytest.mark.parametrize("mode", ["report", "cut", "exact"])
def test_each_layer_is_fed_by_the_queries_of_the_one_before(mode: str) -> None:
    for name in ("tiny", "tiny-40", "tiny-article", "nano"):
        steps = rows(preset(name).plan, mode)
        assert all(query == write for (_, query), (write, _) in pairwise(steps))
        assert steps[-1][1] == 1


def test_more_windows_replay_more_rows() -> None:
    plan = preset("tiny").plan
    assert rows(plan, "report", 3) == [(24, 24)] * 3 + [(24, 1)]
    assert rows(plan, "cut", 2)[0] == (23, 16)


def test_windows_have_no_effect_on_full_and_exact_and_are_refused() -> None:
    plan = preset("tiny").plan
    for mode in ("full", "exact"):
        check_decoder_prefill(plan, mode, 1)
        message = (
            f"replay_windows=2 has no effect with decoder_prefill='{mode}'; use it with 'report'"
        )
        with pytest.raises(UsageError, match=message):
            check_decoder_prefill(plan, mode, 2)
    with pytest.raises(UsageError, match="replay_windows=0 must be at least 1"):
        check_decoder_prefill(plan, "report", 0)


def test_an_unknown_mode_lists_the_choices() -> None:
    message = "decoder_prefill='half' is not a choice; allowed: full, report, cut, exact"
    with pytest.raises(UsageError, match=message):
        check_decoder_prefill(preset("tiny").plan, "half", 1)


@pytest.mark.parametrize("mode", ["report", "cut", "exact"])
def test_a_plan_without_boundary_rows_can_only_run_in_full(mode: str) -> None:
    plan = preset("tiny").variant(ced=False, csa2=True).plan
    check_decoder_prefill(plan, "full", 1)
    message = (
        f"decoder_prefill='{mode}' is not possible for this model: decoder layer 4 computes its KV "
        f"rows from its own input; use decoder_prefill='full'"
    )
    with pytest.raises(UsageError, match=message):
        check_decoder_prefill(plan, mode, 1)


def test_bounded_encoder_replay_is_whole_windows() -> None:
    plan = preset("v4.1-flash").plan
    for windows in (1, 3):
        count = encoder_replay_rows(plan, "bounded", windows=windows, decoder_rows=128, suffix=7)
        assert count == 128 * windows


def test_exact_encoder_replay_reaches_one_window_per_layer_below_what_is_needed() -> None:
    """20 x 127 = 2,540 rows when the suffix itself feeds the decoder replay, more when it is short."""
    plan = preset("v4.1-flash").plan
    reach = 20 * 127
    for suffix, decoder_rows, extra in ((500, 128, 1), (128, 128, 1), (1, 128, 127), (0, 128, 128)):
        count = encoder_replay_rows(
            plan, "exact", windows=1, decoder_rows=decoder_rows, suffix=suffix
        )
        assert count == reach + extra


def test_boundary_rows_reach_back_to_what_the_mode_promises() -> None:
    plan = preset("v4.1-flash").plan
    assert boundary_rows(plan, "report", 1, suffix=9) == 128
    assert boundary_rows(plan, "report", 2, suffix=9) == 256
    assert boundary_rows(plan, "cut", 1, suffix=9) == 255
    assert boundary_rows(plan, "exact", 1, suffix=9) == 2541
    # full: every new token, and a window per decoder layer below the first of them.
    assert boundary_rows(plan, "full", 1, suffix=300) == 300 + 20 * 127
    assert boundary_rows(plan, "full", 1, suffix=0) == 2541


def test_encoder_replay_choices_are_checked() -> None:
    plan = preset("tiny").plan
    with pytest.raises(
        UsageError, match="encoder_replay='none' is not a choice; allowed: bounded, exact"
    ):
        encoder_replay_rows(plan, "none", windows=1, decoder_rows=8, suffix=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="encoder_replay_windows=0 must be at least 1"):
        encoder_replay_rows(plan, "bounded", windows=0, decoder_rows=8, suffix=1)
    with pytest.raises(UsageError, match=r"encoder_replay_windows=2 has no effect with .*'exact'"):
        encoder_replay_rows(plan, "exact", windows=2, decoder_rows=8, suffix=1)
