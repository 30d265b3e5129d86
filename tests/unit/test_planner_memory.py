"""Slope and intercept of a sequence's memory, block rounding, and what a prefix hit changes.

Pins what capacity planners get wrong in public: windows charged as if they grew, one slope for both
parts, a plan taken from prose instead of the config, and an unstated hit rate.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cedar.config import ModelConfig, preset
from cedar.errors import RequestError
from cedar.formats.rows import RowFormats
from cedar.planner.flows import Planner
from cedar.planner.ledger import Ledger
from cedar.planner.request import Request


def ledger_of(config: ModelConfig, request: Request, flow: str = "ced+csa2") -> Ledger:
    return Planner(config).plan(request, flow).ledger  # type: ignore[arg-type]


def tokens(count: int) -> Request:
    return Request(input_tokens=count - 1, output_tokens=1)


@pytest.fixture(scope="module")
def release() -> ModelConfig:
    return preset("v4.1-flash")


def test_the_released_plan_owns_two_and_a_half_rows_a_token_and_no_640_byte_decoder_row(
    release: ModelConfig,
) -> None:
    ledger = ledger_of(release, tokens(31_000))
    assert ledger["kv_bytes_per_token"] == 890
    assert ledger["kv_per_token.rows"] == 2.5
    assert ledger["kv_per_token.decoder"] == 356


def test_a_plan_with_an_owner_in_every_decoder_group_costs_2314_a_token(
    release: ModelConfig,
) -> None:
    own = replace(
        release,
        kv_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        num_encoder_layers=20,
        candidate_source_layer_id=-1,
    )
    assert ledger_of(own, tokens(31_000))["kv_bytes_per_token"] == 2_314


def test_sharing_rows_of_the_release_saves_a_factor_of_eleven(release: ModelConfig) -> None:
    assert ledger_of(release, tokens(31_000), "ced")["kv_bytes_per_token"] == 10_324


def test_slope_is_the_same_at_every_length_and_the_intercept_does_not_move(
    release: ModelConfig,
) -> None:
    lengths = (1_024, 65_536, 1_048_576)
    ledgers = [ledger_of(release, tokens(n)) for n in lengths]
    assert {ledger["kv_bytes_per_token"] for ledger in ledgers} == {890}
    assert {ledger["sequence_fixed_bytes"] for ledger in ledgers} == {2_703_360 + 12_288}
    assert [ledger["kv_bytes"] for ledger in ledgers] == [890 * n for n in lengths]


def test_windows_weigh_the_same_at_a_thousand_and_at_a_million_tokens(
    release: ModelConfig,
) -> None:
    small, large = (ledger_of(release, tokens(n)) for n in (1_024, 1_048_576))
    assert small["window_bytes"] == large["window_bytes"] == 40 * 128 * 528
    assert large["kv_bytes"] == 933_232_640


def test_concurrency_multiplies_sequences_and_changes_neither_slope_nor_intercept() -> None:
    one = ledger_of(preset("article"), Request(input_tokens=30_000, output_tokens=1_000))
    many = ledger_of(
        preset("article"), Request(input_tokens=30_000, output_tokens=1_000, concurrency=64)
    )
    assert many["sequences_bytes"] == 64 * one["sequences_bytes"]
    for name in ("kv_bytes", "kv_bytes_per_token", "sequence_fixed_bytes"):
        assert many[name] == one[name]


@pytest.mark.parametrize("block_size", [4, 16, 128, 256, 1024])
def test_memory_is_held_in_whole_blocks(block_size: int) -> None:
    request = Request(input_tokens=30_000, output_tokens=1_000, block_size=block_size)
    ledger = ledger_of(preset("article"), request)
    blocks = -(-31_000 // block_size)
    assert ledger["kv_blocks"] == blocks
    assert ledger["kv_allocated_bytes"] == blocks * block_size * 890
    assert 0 <= ledger["kv_allocated_bytes"] - ledger["kv_bytes"] < block_size * 890


def test_a_group_that_is_still_open_stores_no_row() -> None:
    formats = RowFormats.of(preset("article"))
    for count in (30_999, 31_000, 31_003, 31_004):
        kv = ledger_of(preset("article"), tokens(count))["kv_bytes"]
        assert kv == 10 * (count // 4) * formats.global_row_bytes


def test_a_block_that_splits_a_compression_group_is_refused() -> None:
    with pytest.raises(RequestError, match="multiple of 4"):
        ledger_of(preset("article"), Request(input_tokens=10, output_tokens=1, block_size=6))


def test_a_prefix_hit_runs_the_suffix_and_one_window_again() -> None:
    cold = Request(input_tokens=10_240, output_tokens=10)
    warm = Request(input_tokens=10_240, output_tokens=10, hit_rate=0.9)
    no, yes = (ledger_of(preset("article"), request) for request in (cold, warm))
    assert (no["cached_tokens"], no["prefix.replayed_tokens"]) == (0, 0)
    assert yes["cached_tokens"] == 9_216
    assert yes["prefix.replayed_tokens"] == 128
    assert yes["phases.encode.tokens"] == 1_024 + 128
    assert yes["decoder_token_layers"] == no["decoder_token_layers"] == 128 * 20
    assert yes["kv_bytes"] == no["kv_bytes"]
    assert yes["flops.prefill.total"] < 0.13 * no["flops.prefill.total"]


def test_without_ced_a_hit_rebuilds_the_windows_of_all_layers() -> None:
    request = Request(input_tokens=10_240, output_tokens=10, hit_rate=0.9)
    ledger = ledger_of(preset("article"), request, "csa2")
    assert ledger["encode_token_layers"] == ledger["decoder_token_layers"] == 1_152 * 20


def test_hits_are_whole_blocks_and_never_more_than_the_prompt() -> None:
    for rate, cached in ((0.0, 0), (0.5, 4_992), (0.999, 9_984), (1.0, 9_984)):
        request = Request(input_tokens=10_000, output_tokens=1, hit_rate=rate)
        assert ledger_of(preset("article"), request)["cached_tokens"] == cached


def test_a_sum_of_scratch_parts_is_the_scratch() -> None:
    ledger = ledger_of(preset("article-thin"), Request(input_tokens=3_000, output_tokens=1))
    parts = ("stream", "heads", "experts", "tile", "logits")
    total = sum(ledger[f"scratch.{part}_bytes"] for part in parts) + ledger["boundary_bytes"]
    assert ledger["scratch.total_bytes"] == total
