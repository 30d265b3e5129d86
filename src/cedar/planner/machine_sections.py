"""Sections about weights and a machine: where they live, what fits, how long a phase takes."""

from __future__ import annotations

from cedar.planner.export import PlanReport
from cedar.planner.fit import CONTEXTS
from cedar.planner.flows import FlowPlan
from cedar.planner.section import Section, flow_row, sequences, short, words
from cedar.planner.weights import CAN_LIVE
from cedar.units import format_bytes, format_gib, format_percent, format_seconds


def weights_section(report: PlanReport) -> Section:
    """Bytes by residency class, where each can live, and where it is placed."""
    ledger, placement = report.main.ledger, report.main.placement
    header = ["", "bytes", "GiB", "can live in", "because"]
    if placement is not None:
        header.insert(3, "placed in")
    rows = []
    for name, (places, why) in CAN_LIVE.items():
        nbytes = ledger[f"weights.{name}_bytes"]
        if not nbytes:
            continue
        cells = [words(name), format_bytes(nbytes), format_gib(nbytes), ", ".join(places), why]
        if placement is not None:
            cells.insert(3, placement.homes[name] or "no room")
        rows.append(tuple(cells))
    total = ledger["weights.total_bytes"]
    rows.append(("total", format_bytes(total), format_gib(total), *[""] * (len(header) - 3)))
    notes = [
        f"one routed expert {ledger['experts.bytes']:,} B; a token reads "
        f"{format_bytes(ledger['experts.bytes_per_token'])} of experts"
    ]
    if "engram.rows_per_token" in ledger:
        notes.append(_engram(report.main))
    return Section("Weights", tuple(header), rows, notes)


def _engram(plan: FlowPlan) -> str:
    ledger = plan.ledger
    text = (
        f"n-gram memory: {ledger['engram.rows_per_token']} rows = "
        f"{ledger['engram.bytes_per_token']:,} B a token, "
        f"{ledger['engram.sector_bytes_per_token']:,} B in 4 KiB sectors "
        f"({ledger['engram.released_sector_bytes_per_token']:,} B as released, scales apart); "
        f"{ledger['engram.prompt_rows']:,} random reads for the prompt"
    )
    if "engram.prompt_batched_seconds" in ledger:
        text += (
            f", from an SSD {format_seconds(ledger['engram.prompt_batched_seconds'])} batched or "
            f"{format_seconds(ledger['engram.prompt_serial_seconds'])} one by one"
        )
    return f"{text}; page-locked the tables take {format_gib(ledger['engram.pinned_bytes'])}"


def machine_section(report: PlanReport) -> Section:
    """Demand on the first tier, the verdict, and what else would fit."""
    plan = report.main
    assert plan.site is not None
    assert plan.placement is not None
    ledger, machine, placement = plan.ledger, plan.site.machine, plan.placement
    first = placement.first.place
    rows: list[tuple[str, ...]] = [
        (words(name), format_bytes(placement.sizes[name]))
        for name in placement.in_place(first)
        if placement.sizes[name]
    ]
    rows += [
        (sequences(report.request.concurrency), format_bytes(ledger["sequences_bytes"])),
        ("scratch (estimate)", format_bytes(ledger["scratch.total_bytes"])),
        ("allowance", format_bytes(ledger["allowance_bytes"])),
        ("needed", format_bytes(ledger["fit.required_bytes"])),
        (f"{first.upper()} of one device", format_bytes(machine.memory_bytes)),
    ]
    refusal = plan.refusal()
    notes = [_verdict(plan) if refusal is None else str(refusal)]
    if "cache.routed_experts_share" in ledger:
        share = format_percent(ledger["cache.routed_experts_share"])
        notes.append(f"experts are mapped from the SSD; RAM left over caches {share} of them")
    notes.append(f"{machine.summary} [{machine.kind}: {machine.source}]")
    return Section(f"Fit, flow {plan.flow}", ("on the first tier", "bytes"), rows, notes)


def _verdict(plan: FlowPlan) -> str:
    ledger = plan.ledger
    context = ledger["fit.largest_context"]
    limit = " (the model's limit)" if context == ledger["model.max_context"] else ""
    at = [
        f"{ledger[f'fit.concurrency_at.t{tokens}']:,} of {tokens // 1024:,}K"
        for tokens in CONTEXTS
        if f"fit.concurrency_at.t{tokens}" in ledger
    ]
    return (
        f"fits, {format_bytes(ledger['fit.free_bytes'])} free: largest context {context:,} tokens"
        f"{limit} at this concurrency; largest concurrency "
        f"{ledger['fit.largest_concurrency']:,} at this context"
        + (f"; sequences by context: {', '.join(at)}" if at else "")
    )


def times_section(report: PlanReport) -> Section:
    """Roofline times of prefill and decode, and what bounds them."""
    plans = report.flows.values()
    rows = [
        flow_row(report, "prefill, one sequence", "roofline.prefill.seconds", format_seconds),
        flow_row(report, "  arithmetic alone", "roofline.prefill.compute_seconds", format_seconds),
        ("  bound by", *(plan.bounds.get("prefill", "-") for plan in plans)),
        flow_row(
            report, "decode step, all sequences", "roofline.decode.step_seconds", format_seconds
        ),
        ("  bound by", *(plan.bounds.get("decode", "-") for plan in plans)),
        flow_row(
            report, "tokens a second, all sequences", "roofline.decode.tokens_per_second", short
        ),
    ]
    note = "roofline: bytes / bandwidth or FLOPs / FLOP/s, the slower; lower bounds, not measured"
    return Section("Times (derived)", ("", *report.flows), rows, [note])
