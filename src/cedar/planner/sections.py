"""The human report as sections: titles, table rows and notes, still without any layout.

Every number is read from a ledger line; nothing is computed here but percentages for the eye.
"""

from __future__ import annotations

from collections.abc import Iterator

from cedar.planner.export import PlanReport
from cedar.planner.flows import FlowPlan
from cedar.planner.machine_sections import machine_section, times_section, weights_section
from cedar.planner.section import Format, Section, flow_row, sequences
from cedar.planner.storage import TURNS
from cedar.units import format_bytes, format_count, format_flops, format_percent, format_seconds


def sections(report: PlanReport) -> Iterator[Section]:
    """Every section that this report has something to say in."""
    yield _flows(report)
    yield weights_section(report)
    if report.main.site is not None:
        yield machine_section(report)
        if report.main.fits:
            yield times_section(report)
    if report.modes:
        yield _modes(report)
    yield _prefix(report)
    if report.differences:
        yield Section(
            "Where the article and the release differ",
            ("", "article", "release"),
            [(d.topic, d.article, d.release) for d in report.differences],
            prose=True,
        )


def title(report: PlanReport) -> list[str]:
    """The lines above the first section."""
    ledger, request, model = report.main.ledger, report.request, report.planner.model
    plan = report.main.config.plan
    owners = ", ".join(str(spec.layer_id) for spec in plan.kv_owners) or "none"
    headers = ""
    if model.measured is not None:
        headers = f", weights from the headers of {model.tensors:,} tensors"
    lines = [
        f"{model.name}: {request.input_tokens:,} input + {request.output_tokens:,} output tokens, "
        f"{sequences(request.concurrency)} at once, assumed prefix hit rate "
        f"{format_percent(request.hit_rate)} ({ledger['cached_tokens']:,} tokens cached)",
        f"{len(plan)} layers = {len(plan.encoder)} encoder + {len(plan.decoder)} decoder, window "
        f"{plan.sliding_window}, KV owners {owners}{headers}",
    ]
    for names, verb, fault in (
        (model.unknown, "hold", "that the config does not ask for"),
        (model.missing, "lack", "that the config asks for"),
        (model.differing, "hold", "in another dtype or shape than the config asks for"),
    ):
        if names:
            count = "1 tensor" if len(names) == 1 else f"{len(names):,} tensors"
            lines.append(f"warning: the files {verb} {count} {fault}: {_first(names)}")
    return lines


def _first(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def _billions(value: float) -> str:
    return f"{value / 1e9:.2f} B" if value >= 1e8 else f"{value / 1e6:.2f} M"


def _printed(value: float) -> str:
    return format_bytes(value, 1)


def _activation(value: float) -> str:
    return format_count(round(value) if value >= 100 else value, 3)


def _phase(report: PlanReport, label: str, name: str) -> tuple[str, ...]:
    """Tokens x layers of one phase in every flow."""
    cells = []
    for plan in report.flows.values():
        layers = plan.ledger[f"phases.{name}.layers"]
        cells.append(f"{plan.ledger[f'phases.{name}.tokens']:,} x {layers}" if layers else "-")
    return (label, *cells)


def _flows(report: PlanReport) -> Section:
    def row(label: str, name: str, form: Format = format_count) -> tuple[str, ...]:
        return flow_row(report, label, name, form)

    quoted = any("quoted.persisted_bytes" in plan.ledger for plan in report.flows.values())
    nominal = report.planner.family == "article"
    rows = [
        ("reading (prefill), tokens x layers",),
        _phase(report, "encode", "encode"),
        _phase(report, "project KV", "project"),
        _phase(report, "decoder layers", "replay"),
        row("activated parameters a token", "activated_prefill", _billions),
        row("activation, 10^9 parameter-tokens", "prefill_activation", _activation),
    ]
    if nominal:
        rows.append(row("  counted from shapes", "prefill_activation_derived", _activation))
    rows += [
        row("FLOPs", "flops.prefill.total", format_flops),
        ("answering (decode)",),
        _phase(report, "tokens x layers", "decode"),
        row("activated parameters a token", "activated_decode", _billions),
        row("FLOPs a token, mean", "flops.decode_token", format_flops),
        ("remembering, one sequence",),
        row("KV bytes a token (slope)", "kv_bytes_per_token"),
        row("KV cache", "kv_bytes", format_bytes),
        row("  in whole blocks", "kv_allocated_bytes", format_bytes),
        row("windows (fixed)", "window_bytes", format_bytes),
        row("open groups (fixed)", "open_group_bytes", format_bytes),
        row("persisted prefix", "persisted_bytes", format_bytes),
    ]
    notes = [
        "labels: all derived (--explain prints the formulas), but for what says quoted or article"
    ]
    if quoted:
        rows.append(row("  as the article prints it", "quoted.persisted_bytes", _printed))
    if nominal:
        notes.append(
            "activation uses the article's nominal 16 B and 8 B parameters (quoted); counted from "
            "shapes it is the line below"
        )
    if quoted:
        notes.append(
            "the article halves the shared cache once more on disk; cedar persists every global "
            "row and never a window"
        )
    notes += [f"flow {flow} is not possible: {why}" for flow, why in report.unavailable.items()]
    return Section("Flows", ("", *report.flows), rows, notes)


def _modes(report: PlanReport) -> Section:
    rows: list[tuple[str, ...]] = []
    for mode in report.modes:
        ledger = mode.plan.ledger
        lengths = (mode.no_gain_up_to, mode.tenth_saved_from, mode.pays_from)
        rows.append(
            (
                mode.mode,
                f"{ledger['phases.replay.tokens']:,}",
                f"{ledger['decoder_token_layers']:,}",
                format_flops(ledger["flops.prefill.total"]),
                format_percent(mode.flops_share),
                *("-" if length is None else f"{length:,}" for length in lengths),
            )
        )
    header = ("mode", "decoder rows", "x layers", "prefill FLOPs", "of full", "no gain up to",
              "saves 10% from", "pays from")  # fmt: skip
    note = (
        "lengths are prompt tokens; up to one window every mode is the same computation; pays "
        "from: the roofline time saved exceeds the stated overhead"
    )
    return Section("CED in its modes", header, rows, [note])


def _prefix(report: PlanReport) -> Section:
    ledger = report.main.ledger
    rows: list[tuple[str, ...]] = []
    for tokens in TURNS:
        share = ledger[f"store.turn_share.t{tokens}"]
        rows.append((f"{tokens:,}", format_percent(share), f"1/{1 / share:.2f}" if share else "-"))
    notes = [
        f"baseline: {format_count(ledger['store.baseline_bytes_per_token'])} B/token (the same "
        f"model unshared) and all windows, {ledger['window_bytes']:,} B, at each boundary; this "
        f"request with a boundary every {ledger['tokens_per_turn']:,}: "
        f"{format_bytes(ledger['persisted_bytes'])} against "
        f"{format_bytes(ledger['store.baseline_bytes'])}"
    ]
    if "store.eighth_at" in ledger:
        notes.append(f"1/8 at {ledger['store.eighth_at']:,.0f} tokens between boundaries")
    if "quoted.v4_flash_turn_share" in ledger:
        notes.append(
            f"against the previous generation's rows (quoted 3,514 B/token) and these windows: "
            f"1/{1 / ledger['quoted.v4_flash_turn_share']:.2f} at {ledger['tokens_per_turn']:,}"
        )
    notes.append(_hit(report.main))
    return Section(
        "Persisted bytes against a cache that stores windows",
        ("tokens between boundaries", "share", ""), rows, notes,
    )  # fmt: skip


def _hit(plan: FlowPlan) -> str:
    ledger = plan.ledger
    text = (
        f"a prefix hit runs {ledger['hit.replay_rows']:,} rows again = "
        f"{ledger['hit.replay_token_layers']:,} token-layers, "
        f"{format_flops(ledger['hit.replay_flops'])} ({ledger['hit.exact_rows']:,} rows to be "
        f"exact), instead of reading {format_bytes(ledger['hit.restore_bytes'])} of windows"
    )
    if "hit.replay_seconds" in ledger:
        text += (
            f": {format_seconds(ledger['hit.replay_seconds'])} of arithmetic against "
            f"{format_seconds(ledger['hit.restore_seconds'])} of SSD"
        )
    return text
