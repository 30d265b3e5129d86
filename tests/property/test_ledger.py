"""Ledger against independent counts, over random layer plans and requests.

bytes       ledger == `formats.rows` == sums by hand
rows read   ledger == a loop over every query
formulas    other inputs in the same ledger == planning that request
totals      every total is the sum of its parts
flows       up to one window, CED in any mode is the same computation as no CED
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.config import LayerPlan, ModelConfig, preset
from cedar.config.weight_schema import weight_schema
from cedar.formats.rows import RowFormats
from cedar.planner.export import grid, to_program
from cedar.planner.expression import evaluate
from cedar.planner.flows import Planner, Site
from cedar.planner.hardware import Machine
from cedar.planner.ledger import Ledger
from cedar.planner.request import DECODER_PREFILL, FLOWS, Flow, Request
from cedar.planner.weights import PRODUCTS

TINY = preset("tiny")
BOX = Machine(
    name="box", title="a box", memory_bytes=10**12, bandwidth=4e10, flops=4e11, accelerator=False,
    kind="given", source="test",
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """A tiny body on a random plan: window layers, then groups that share rows."""
    windows = draw(st.integers(0, 2))
    groups = draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.lists(st.booleans(), max_size=3)),
                 min_size=1, max_size=4)
    )  # fmt: skip
    ratios, owners, indexers = [0] * windows, [], []
    for ratio, borrowers in groups:
        owners.append(len(ratios))
        for offset, reindexes in enumerate([True, *borrowers]):
            if reindexes:
                indexers.append(owners[-1] + offset)
        ratios += [ratio] * (1 + len(borrowers))
    layers = len(ratios)
    pool = draw(st.booleans())
    return replace(
        TINY,
        num_hidden_layers=layers,
        compress_ratios=tuple(ratios),
        kv_source_layer_ids=tuple(owners),
        index_source_layer_ids=tuple(indexers),
        candidate_source_layer_id=owners[-1] if pool else -1,
        num_encoder_layers=draw(st.integers(1, layers)),
        kv_adapter=draw(st.sampled_from(["none", "diag"])),
        sliding_window=draw(st.sampled_from([1, 3, 8])),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        input_tokens=draw(st.integers(1, 200)),
        output_tokens=draw(st.integers(1, 50)),
        concurrency=draw(st.integers(1, 5)),
        hit_rate=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        block_size=draw(st.sampled_from([12, 24, 96])),
        max_num_batched_tokens=draw(st.sampled_from([7, 64, 4096])),
        tokens_per_turn=draw(st.integers(1, 300)),
        decoder_prefill=draw(st.sampled_from(DECODER_PREFILL)),
        encoder_replay=draw(st.sampled_from(["bounded", "exact"])),
    )


def possible(planner: Planner) -> list[Flow]:
    return [flow for flow in FLOWS if planner.blocker(flow) is None]


def variants(config: ModelConfig) -> list[tuple[Flow, LayerPlan]]:
    planner = Planner(config)
    return [
        (flow, config.variant(ced="ced" in flow.split("+"), csa2="csa2" in flow).plan)
        for flow in possible(planner)
    ]


@given(configs(), requests())
@settings(max_examples=60, deadline=None)
def test_ledger_bytes_are_those_of_the_byte_calculator(
    config: ModelConfig, request: Request
) -> None:
    planner, rows = Planner(config), RowFormats.of(config)
    for flow, plan in variants(config):
        ledger = planner.plan(request, flow).ledger
        total, size = request.total_tokens, request.block_size
        assert ledger["kv_bytes"] == rows.kv_bytes(plan, total) == ledger["persisted_bytes"]
        assert abs(ledger["kv_bytes_per_token"] - rows.kv_bytes_per_token(plan)) < 1e-9
        assert ledger["window_bytes"] == rows.window_bytes(plan)
        assert ledger["open_group_bytes"] == rows.open_group_bytes(plan)
        blocks = -(-total // size)
        assert ledger["kv_allocated_bytes"] == rows.kv_bytes(plan, blocks * size)
        assert ledger["store.complete_block_bytes"] == rows.kv_bytes(plan, total // size * size)


@given(configs(), requests())
@settings(max_examples=60, deadline=None)
def test_rows_read_are_those_of_a_loop_over_every_query(
    config: ModelConfig, request: Request
) -> None:
    request = replace(request, decoder_prefill="full")
    planner = Planner(config)
    for flow, plan in variants(config):
        ledger = planner.plan(request, flow).ledger
        start = int(ledger["phases.encode.start"])
        prompt = range(start, request.input_tokens)
        answer = range(request.input_tokens, request.total_tokens)
        last = [request.input_tokens - 1]
        decoder = [prompt] * len(plan.decoder)
        if decoder:
            decoder[-1] = last  # type: ignore[call-overload]  # only its last row is wanted
        for phase, layers, queries, floor in (
            ("encode", plan.encoder, [prompt] * len(plan.encoder), start),
            ("replay", plan.decoder, decoder, start),
            ("decode", plan.layers, [answer] * len(plan), 0),
        ):
            scored = selected = window = 0
            for spec, positions in zip(layers, queries, strict=True):
                for t in positions:
                    window += min(t - floor + 1, plan.sliding_window)
                    if spec.role == "window":
                        continue
                    visible = (t + 1) // spec.compress_ratio
                    selected += min(visible, plan.index_topk)
                    if spec.role in ("full", "reindex"):
                        pool = plan.candidate_topk_blocks * plan.candidate_block_size
                        scored += min(visible, pool) if spec.candidate == "consumer" else visible
            assert ledger[f"entries.{phase}.scored"] == scored
            assert ledger[f"entries.{phase}.selected"] == selected
            assert ledger[f"entries.{phase}.window"] == window


@given(configs(), requests(), requests())
@settings(max_examples=40, deadline=None)
def test_the_same_formulas_at_other_inputs_are_the_plan_of_that_request(
    config: ModelConfig, one: Request, other: Request
) -> None:
    other = replace(other, decoder_prefill=one.decoder_prefill, encoder_replay=one.encoder_replay)
    planner, site = Planner(config), Site(BOX)
    changes = {
        name: getattr(other, name)
        for name in ("input_tokens", "output_tokens", "concurrency", "hit_rate", "block_size",
                     "max_num_batched_tokens", "tokens_per_turn")
    }  # fmt: skip
    for flow in possible(planner):
        moved = planner.plan(one, flow, site).ledger.with_values(changes)
        assert dict(moved) == dict(planner.plan(other, flow, site).ledger)


@given(configs(), requests())
@settings(max_examples=40, deadline=None)
def test_totals_are_the_sums_of_their_parts(config: ModelConfig, request: Request) -> None:
    planner = Planner(config)
    for flow in possible(planner):
        ledger = planner.plan(request, flow, Site(BOX)).ledger
        variant = config.variant(ced="ced" in flow.split("+"), csa2="csa2" in flow)
        tensors = list(weight_schema(variant))
        assert ledger["parameters.total"] == sum(tensor.parameters for tensor in tensors)
        assert ledger["weights.total_bytes"] == sum(tensor.nbytes for tensor in tensors)
        for phase in ("encode", "replay", "decode"):
            parts = [name for name in ledger if name.startswith(f"flops.{phase}.")]
            total = f"flops.{phase}.total"
            assert _close(ledger[total], sum(ledger[name] for name in parts if name != total))
            assert len(parts) >= len(PRODUCTS) + 3
        sides = (ledger["kv_per_token.encoder"], ledger["kv_per_token.decoder"])
        kinds = (ledger["kv_per_token.main"], ledger["kv_per_token.index"])
        for parts_of_a_token in (sides, kinds):
            assert _close(ledger["kv_bytes_per_token"], sum(parts_of_a_token))
        for line in ledger.lines:
            if line.inputs:
                assert evaluate(line.formula, line.inputs) == line.value


@given(configs(), st.integers(1, 8), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_up_to_one_window_every_mode_of_ced_is_the_computation_without_it(
    config: ModelConfig, input_tokens: int, output_tokens: int
) -> None:
    config = replace(config, sliding_window=8)
    planner = Planner(config)
    for ced, plain in (("ced", "none"), ("ced+csa2", "csa2")):
        if planner.blocker(ced):
            continue
        for mode in DECODER_PREFILL:
            request = Request(
                input_tokens=input_tokens, output_tokens=output_tokens, decoder_prefill=mode,
                block_size=12,
            )  # fmt: skip
            with_ced = planner.plan(request, ced).ledger
            without = planner.plan(request, plain).ledger
            for name in ("flops.prefill.total", "flops.decode.total", "kv_bytes",
                         "encode_token_layers", "decoder_token_layers",
                         "prefill_activation"):  # fmt: skip
                assert _close(with_ced[name], without[name]), (name, mode)


@given(configs(), requests())
@settings(max_examples=40, deadline=None)
def test_less_runs_with_ced_and_less_is_kept_with_csa2(
    config: ModelConfig, request: Request
) -> None:
    request = replace(request, encoder_replay="bounded")  # exact replay for CED needs more rows
    planner = Planner(config)
    plans = {flow: planner.plan(request, flow).ledger for flow in possible(planner)}
    for flow, ledger in plans.items():
        assert ledger["kv_bytes"] <= plans["none"]["kv_bytes"]
        assert ledger["decoder_token_layers"] <= plans["none"]["decoder_token_layers"]
        assert ledger["window_bytes"] == plans["none"]["window_bytes"], flow


def test_a_program_run_in_order_gives_the_ledger() -> None:
    plan = Planner(preset("nano")).plan(Request(input_tokens=999, output_tokens=7), "ced+csa2")
    values: dict[str, float] = {}
    for step in to_program(plan.ledger):
        formula = step.get("formula")
        values[step["name"]] = step["value"] if formula is None else evaluate(formula, values)
    assert values == dict(plan.ledger)


def test_a_grid_is_the_plan_at_each_of_its_points() -> None:
    planner = Planner(preset("nano"))
    plan = planner.plan(Request(input_tokens=999, output_tokens=7), "csa2")
    rows = grid(plan, ["kv_bytes", "flops.prefill.total"], [100, 30_000], [1, 1_000])
    assert len(rows) == 4
    for row in rows:
        request = Request(
            input_tokens=int(row["input_tokens"]), output_tokens=int(row["output_tokens"])
        )
        ledger: Ledger = planner.plan(request, "csa2").ledger
        assert row["kv_bytes"] == ledger["kv_bytes"]
        assert row["flops.prefill.total"] == ledger["flops.prefill.total"]


def _close(left: float, right: float) -> bool:
    return abs(left - right) <= 1e-9 * max(abs(left), abs(right), 1.0)
