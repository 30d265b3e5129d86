"""Published counts of the release and the article's table, reproduced to the digit.

Sources: section 10 of the architecture's specification (counts, FLOPs against context, KV bytes of
four generations), section 8 (rows of the decoder's prefill), and the article's table for 30,000
input and 1,000 output tokens.
"""

from __future__ import annotations

import pytest

from cedar.config import preset
from cedar.planner.flows import FlowPlan, Planner, plan_all_flows, plan_request
from cedar.planner.hardware import find_machine
from cedar.planner.quoted import generations
from cedar.planner.request import FLOWS, DecoderPrefill, Flow, Request
from cedar.planner.weights import weigh

ARTICLE = Request(input_tokens=30_000, output_tokens=1_000)


@pytest.fixture(scope="module")
def release() -> Planner:
    return Planner(preset("v4.1-flash"))


@pytest.fixture(scope="module")
def article() -> Planner:
    return Planner(preset("article"))


def planned(planner: Planner, flow: Flow = "ced+csa2", request: Request = ARTICLE) -> FlowPlan:
    return planner.plan(request, flow)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("parameters.backbone", 551_566_180_464),
        ("parameters.engram_tables", 196_613_849_600),
        ("parameters.engram", 314_654_720),
        ("parameters.vision", 485_268_480),
        ("parameters.draft", 14_225_362_530),
        ("parameters.total", 763_205_315_794),
        ("parameters.embed", 661_913_600),
        ("parameters.head", 661_913_600),
        ("activated_prefill", 7_895_563_064),
        ("activated_prefill_after_first_decoder_layer", 8_278_273_454),
        ("activated_decode", 16_130_583_664),
        ("activated_decode_headless", 15_468_670_064),
        ("experts.bytes", 18_800_640),
        ("engram.rows_per_token", 48),
        ("engram.bytes_per_token", 12_672),
        ("engram.sector_bytes_per_token", 196_608),
        ("kv_bytes_per_token", 890),
        ("kv_per_token.rows", 2.5),
        ("kv_per_token.encoder", 534),
        ("kv_per_token.decoder", 356),
        ("kv_per_token.main", 720),
        ("kv_per_token.index", 170),
        ("window_bytes", 2_703_360),
        ("draft_window_bytes", 202_752),
        ("open_group_bytes", 12_288),
        ("boundary_bytes", 5_244_928),
        ("model.candidate_pool", 16_384),
        ("weights.total_bytes", 510_286_023_000),
        ("weights.engram_tables_bytes", 202_758_032_400),
    ],
)
def test_the_release_counts_to_the_published_number(
    release: Planner, name: str, count: float
) -> None:
    assert planned(release).ledger[name] == count


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ("routed_experts", 543_581_798_400),
        ("shared_experts", 1_415_577_600),
        ("attention", 5_064_696_320),
        ("router", 78_673_920),
        ("hyper_connections", 39_323_760),
        ("compressor", 18_352_128),
        ("indexer", 43_516_416),
    ],
)
def test_the_release_counts_each_part_to_the_published_number(
    release: Planner, part: str, count: int
) -> None:
    ledger = planned(release).ledger
    assert ledger[f"parameters.encoder.{part}"] + ledger[f"parameters.decoder.{part}"] == count


def test_a_plain_layer_activates_what_is_published() -> None:
    ledger = planned(Planner(preset("v4.1-flash"))).ledger
    first = ledger["activated.first_decoder"] - ledger["activated.first_projection"]
    assert first - (4096 * 1280 + 32 * 5120) == 377_303_670


def test_the_release_has_the_published_number_of_tensors() -> None:
    assert weigh(preset("v4.1-flash")).total.tensors == 96_085


@pytest.mark.parametrize(
    ("context", "scoring", "total"),
    [
        (4_096, 0.22, 35.70),
        (65_536, 1.88, 37.36),
        (262_144, 5.91, 41.39),
        (1_048_576, 22.01, 57.49),
    ],
)
def test_decode_flops_against_context_are_the_published_table(
    release: Planner, context: int, scoring: float, total: float
) -> None:
    step = Request(input_tokens=context - 1, output_tokens=1)
    ledger = planned(release, request=step).ledger
    billions = {
        part: ledger[f"flops.decode.{part}"] / 1e9
        for part in ("routed_experts", "attention_projections", "shared_experts", "index_queries",
                     "engram", "router", "hyper_connections", "kv_projections", "index_weights",
                     "head", "index_scoring", "attention")
    }  # fmt: skip
    quantised = ("attention_projections", "shared_experts", "index_queries", "engram")
    wide = ("router", "hyper_connections", "kv_projections", "index_weights", "head")
    assert round(billions["routed_experts"], 2) == 16.99
    assert round(sum(billions[part] for part in quantised), 2) == 13.67
    assert round(sum(billions[part] for part in wide), 2) == 1.60
    assert round(billions["index_scoring"], 2) == scoring
    assert round(billions["attention"], 2) == 3.22
    assert round(ledger["flops.decode.total"] / 1e9, 2) == total


def test_positions_scored_in_a_decode_step_follow_the_published_formula(release: Planner) -> None:
    for context in (4_096, 100_001, 1_048_576):
        step = Request(input_tokens=context - 1, output_tokens=1)
        scored = planned(release, request=step).ledger["entries.decode.scored"]
        assert scored == 3 * (context // 2) + context + 4 * min(context, 16_384)


def test_a_query_reads_at_most_640_rows_a_layer(release: Planner) -> None:
    ledger = planned(release, request=Request(input_tokens=100_000, output_tokens=1)).ledger
    assert ledger["entries.decode.window"] == 40 * 128
    assert ledger["entries.decode.selected"] == 38 * 512


def test_kv_bytes_of_four_generations_have_the_published_ratios() -> None:
    table = generations()
    assert table == {"V1": 389_120, "V3.2": 48_068, "V4-Flash": 3_514.25, "V4.1-Flash": 890}
    ratios = [round(table[name] / 890, digits)
              for name, digits in (("V4-Flash", 2), ("V3.2", 1), ("V1", 1))]  # fmt: skip
    assert ratios == [3.95, 54.0, 437.2]


@pytest.mark.parametrize(
    ("flow", "activation", "kv", "persisted", "printed"),
    [
        ("none", 480_000, 110_360_000, 110_360_000, 110.4),
        ("ced", 240_000, 110_360_000, 110_360_000, 110.4),
        ("csa2", 480_000, 27_590_000, 27_590_000, 27.6),
        ("ced+csa2", 240_000, 27_590_000, 27_590_000, 13.8),
    ],
)
def test_the_articles_table_comes_out_as_printed_and_cedars_own_beside_it(
    article: Planner, flow: Flow, activation: int, kv: int, persisted: int, printed: float
) -> None:
    ledger = planned(article, flow).ledger
    assert ledger["prefill_activation"] == activation
    assert ledger["kv_bytes"] == kv
    assert ledger["persisted_bytes"] == persisted
    assert round(ledger["quoted.persisted_bytes"] / 1e6, 1) == printed
    assert ledger.line("quoted.persisted_bytes").kind == "quoted"
    assert ledger["prefill_activation_derived"] != activation


def test_the_articles_nominal_parameters_are_quoted_and_its_shapes_are_counted(
    article: Planner,
) -> None:
    line = planned(article).ledger.line("prefill_activation")
    assert "quoted.activated_prefill" in line.inputs
    assert "quoted" in line.source
    assert planned(article).ledger["activated_prefill"] == 7_653_223_480


def test_the_thin_article_keeps_the_articles_bytes_but_not_its_parameters() -> None:
    thin = planned(Planner(preset("article-thin"))).ledger
    assert thin["kv_bytes"] == thin["quoted.kv_bytes"] == 27_590_000
    assert "quoted.activated_prefill" not in thin
    assert thin["prefill_activation"] == thin["prefill_activation_derived"]


@pytest.mark.parametrize(
    ("mode", "rows", "token_layers"),
    [
        ("full", 30_000, 30_000 * 20),
        ("report", 128, 128 * 20),
        ("cut", 255, 128 * 20 + 127),
        ("exact", 2_541, sum(128 + j * 127 for j in range(20))),
    ],
)
def test_decoder_rows_of_each_mode_are_the_published_cone(
    release: Planner, mode: DecoderPrefill, rows: int, token_layers: int
) -> None:
    request = Request(input_tokens=30_000, output_tokens=1_000, decoder_prefill=mode)
    ledger = planned(release, request=request).ledger
    assert ledger["phases.replay.tokens"] == rows
    assert ledger["decoder_token_layers"] == token_layers
    assert ledger["encode_token_layers"] == 600_000


def test_exact_mode_queries_2414_rows_in_the_first_decoder_layer(release: Planner) -> None:
    request = Request(input_tokens=30_000, output_tokens=1, decoder_prefill="exact")
    ledger = planned(release, request=request).ledger
    assert ledger["decoder_query_layers"] == sum(128 + j * 127 for j in range(19)) + 1
    assert 128 + 18 * 127 == 2_414


def test_without_ced_every_row_runs_through_every_layer(release: Planner) -> None:
    for flow in FLOWS:
        ledger = planned(release, flow).ledger
        assert ledger["decoder_token_layers"] == (2_560 if "ced" in flow else 600_000)
        assert ledger["phases.project.layers"] == {"ced": 20, "ced+csa2": 1}.get(flow, 0)


def test_the_short_calls_plan_what_the_planner_plans(article: Planner) -> None:
    config = preset("article")
    one = plan_request(config, ARTICLE, "csa2")
    all_four = plan_all_flows(config, ARTICLE, find_machine("dgx-h200"))
    assert dict(one.ledger) == dict(planned(article, "csa2").ledger)
    assert list(all_four) == list(FLOWS)
    assert all(plan.fits for plan in all_four.values())
    assert one.fits is None
