"""Persisted bytes: all global rows and nothing else, against a cache that also stores windows."""

from __future__ import annotations

import pytest

from cedar.config import preset
from cedar.planner.flows import Planner
from cedar.planner.ledger import Ledger
from cedar.planner.request import Request


def ledger_of(name: str, **fields: int) -> Ledger:
    request = Request(**{"input_tokens": 30_000, "output_tokens": 1_000, **fields})  # type: ignore[arg-type]
    return Planner(preset(name)).plan(request, "ced+csa2").ledger


def test_what_is_persisted_is_the_kv_cache_and_no_window() -> None:
    ledger = ledger_of("article")
    assert ledger["persisted_bytes"] == ledger["kv_bytes"] == 27_590_000
    assert ledger["store.complete_block_bytes"] == 31_000 // 128 * 128 * 890


def test_the_share_of_the_baseline_is_an_eighth_at_about_760_tokens() -> None:
    ledger = ledger_of("article")
    assert ledger["store.baseline_bytes_per_token"] == 3_560
    assert ledger["store.windows_equal_rows_at"] == pytest.approx(759.4, abs=0.05)
    assert ledger["store.eighth_at"] == pytest.approx(759.4, abs=0.05)
    assert 1 / ledger["store.turn_share.t760"] == pytest.approx(8, abs=0.01)


def test_boundaries_closer_together_make_the_baseline_heavier() -> None:
    ledger = ledger_of("article")
    shares = [ledger[f"store.turn_share.t{tokens}"] for tokens in (128, 512, 760, 2048, 16384)]
    assert shares == sorted(shares)
    assert shares[-1] < 1 / 4


def test_the_request_itself_counts_one_boundary_a_turn_and_one_at_the_end() -> None:
    for turn, boundaries in ((31_000, 1), (30_999, 2), (760, 41), (100_000, 1)):
        ledger = ledger_of("article", tokens_per_turn=turn)
        assert ledger["store.boundaries"] == boundaries
        assert ledger["store.baseline_bytes"] == 110_360_000 + boundaries * 2_703_360


def test_the_release_is_an_eighth_of_the_previous_generation() -> None:
    ledger = ledger_of("v4.1-flash")
    assert 1 / ledger["quoted.v4_flash_share"] == pytest.approx(7.90, abs=0.01)
    assert ledger["quoted.v4_flash_persisted_bytes"] / 1e6 == pytest.approx(217.9, abs=0.05)
    assert 1 / ledger["quoted.v4_flash_turn_share"] == pytest.approx(7.95, abs=0.01)
    assert ledger.line("quoted.v4_flash_share").kind == "quoted"


def test_windows_at_every_256_tokens_would_weigh_twelve_times_the_rows() -> None:
    ledger = ledger_of("v4.1-flash")
    assert ledger["window_bytes"] / (256 * 890) == pytest.approx(11.9, abs=0.05)


def test_a_hit_runs_one_window_through_the_encoder_instead_of_reading_windows() -> None:
    ledger = ledger_of("v4.1-flash")
    assert ledger["hit.replay_token_layers"] == 128 * 20
    assert ledger["hit.exact_rows"] == 20 * 127 + 1
    assert ledger["hit.restore_bytes"] == 20 * 128 * 528


def test_without_ced_a_hit_replays_and_restores_all_layers() -> None:
    request = Request(input_tokens=30_000, output_tokens=1_000)
    ledger = Planner(preset("v4.1-flash")).plan(request, "csa2").ledger
    assert ledger["hit.replay_token_layers"] == 128 * 40
    assert ledger["hit.restore_bytes"] == 2_703_360


def test_the_replay_of_a_hit_costs_what_a_prefill_of_those_rows_costs() -> None:
    short = ledger_of("article", input_tokens=128)
    assert short["hit.replay_flops"] == short["flops.encode.total"]
