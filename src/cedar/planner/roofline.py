"""Roofline times: bytes over bandwidth and FLOPs over FLOP/s, the slower one bounds. Lower bounds.

Every tier is read in parallel with the others and with arithmetic, at its full rate; nothing is
measured here. Weights are read once per chunk in prefill and once per step in decode; experts as
many as uniform routing is expected to touch. Bytes are those of one device.
"""

from __future__ import annotations

from typing import Literal

from cedar.planner.fit import Placement
from cedar.planner.hardware import DISK_READ_SECONDS, DISK_READS_PER_SECOND
from cedar.planner.ledger import Ledger
from cedar.planner.weights import ModelWeights, weight_class

Phase = Literal["prefill", "decode"]

_TRAFFIC = "bytes one device reads"
_BOUND = "roofline: a lower bound, not a measurement"
_BANDWIDTH = {"first": "machine.bandwidth", "ram": "machine.host_bandwidth",
              "ssd": "machine.disk_bandwidth"}  # fmt: skip
#: What bounds a phase, in the words of the report.
BOUNDS = {"gpu": "GPU bandwidth", "ram": "RAM bandwidth", "ssd": "SSD reads", "compute": "FLOP/s"}


def add_roofline(
    ledger: Ledger, placement: Placement, weights: ModelWeights, *, skips_decoder: bool
) -> None:
    """Add traffic and times of prefill (one sequence) and of a decode step (all sequences)."""
    _add_prefill_traffic(ledger, weights, skips_decoder=skips_decoder)
    _add_decode_traffic(ledger)
    for phase in ("prefill", "decode"):
        _add_times(ledger, phase, placement)
    ledger.derive(
        "roofline.decode.tokens_per_second", "concurrency / roofline.decode.step_seconds",
        "tokens/s", f"all sequences together; {_BOUND}",
    )  # fmt: skip
    ledger.derive(
        "roofline.decode.total_seconds", "output_tokens * roofline.decode.step_seconds", "s", _BOUND
    )
    ledger.derive(
        "hit.replay_seconds", "hit.replay_flops / (machine.devices * machine.flops)", "s",
        f"replayed rows ride along with the new ones: arithmetic only; {_BOUND}",
    )  # fmt: skip
    ledger.derive(
        "hit.restore_seconds", "hit.restore_bytes / machine.disk_bandwidth", "s",
        f"windows read back from the SSD; {_BOUND}",
    )  # fmt: skip
    if "engram.rows_per_token" in ledger:
        assumed = "assumed: a data-centre NVMe drive"
        ledger.add(
            "machine.disk_reads_per_second", DISK_READS_PER_SECOND, "reads/s",
            "4 KiB random reads, all in flight", assumed, "given",
        )  # fmt: skip
        ledger.add(
            "machine.disk_read_seconds", DISK_READ_SECONDS, "s", "one 4 KiB random read", assumed,
            "given",
        )  # fmt: skip
        ledger.derive(
            "engram.prompt_batched_seconds", "engram.prompt_rows / machine.disk_reads_per_second",
            "s", f"n-gram rows of the prompt from an SSD, all reads in flight; {_BOUND}",
        )  # fmt: skip
        ledger.derive(
            "engram.prompt_serial_seconds", "engram.prompt_rows * machine.disk_read_seconds", "s",
            "the same at queue depth 1",
        )  # fmt: skip


def _add_prefill_traffic(ledger: Ledger, weights: ModelWeights, *, skips_decoder: bool) -> None:
    for side, tally in weights.sides.items():
        nbytes = sum(n for part, n in tally.nbytes.items() if weight_class(part) == "resident")
        ledger.add(
            f"traffic.{side}_resident_bytes", nbytes, "B",
            f"resident tensors of the {side}'s layers", "weight schema", "derived",
        )  # fmt: skip
    ledger.derive(
        "traffic.passes",
        "ceil_div(phases.encode.tokens, prefill_chunk)",
        "passes",
        "prefill chunks",
    )
    passes = "1" if skips_decoder else "traffic.passes"
    share = "rank.resident_bytes / weights.resident_bytes"
    ledger.derive(
        "traffic.prefill.resident_bytes",
        f"({share}) * (weights.resident_bytes"
        f" + (traffic.passes - 1) * traffic.encoder_resident_bytes"
        f" + ({passes} - 1) * traffic.decoder_resident_bytes)",
        "B", f"{_TRAFFIC}; all once, a side's layers once per further pass over them",
    )  # fmt: skip
    rows = "min(prefill_chunk, ceil_div(decoder_query_layers, max(1, model.decoder_layers)))"
    ledger.derive(
        "traffic.prefill.routed_experts_bytes",
        "rank.expert_bytes * (traffic.passes * model.encoder_layers *"
        " touched(model.experts, model.experts_per_token, prefill_chunk)"
        f" + {passes} * model.decoder_layers *"
        f" touched(model.experts, model.experts_per_token, {rows}))",
        "B", f"{_TRAFFIC}; experts touched per chunk and layer, decoder layers at their mean rows",
    )  # fmt: skip
    ledger.derive(
        "traffic.prefill.embed_bytes", "phases.encode.tokens * embed.bytes_per_token", "B", _TRAFFIC
    )
    if "engram.rows_per_token" in ledger:
        ledger.derive(
            "traffic.prefill.engram_tables_bytes",
            "phases.encode.tokens * engram.bytes_per_token", "B", _TRAFFIC,
        )  # fmt: skip


def _add_decode_traffic(ledger: Ledger) -> None:
    ledger.derive("traffic.decode.resident_bytes", "rank.resident_bytes", "B", f"{_TRAFFIC} a step")
    ledger.derive(
        "traffic.decode.routed_experts_bytes",
        "rank.expert_bytes * model.layers *"
        " touched(model.experts, model.experts_per_token, concurrency)",
        "B", f"{_TRAFFIC} a step; experts touched by the batch",
    )  # fmt: skip
    ledger.derive(
        "traffic.decode.rows_bytes",
        "concurrency * (entries.decode.scored * rows.index_bytes + entries.decode.selected *"
        " rows.main_bytes + entries.decode.window * rows.window_bytes) / output_tokens",
        "B", f"{_TRAFFIC} a step, mean over the answer: index keys, selected rows, windows",
    )  # fmt: skip
    ledger.derive(
        "traffic.decode.embed_bytes",
        "concurrency * embed.bytes_per_token",
        "B",
        f"{_TRAFFIC} a step",
    )
    if "engram.rows_per_token" in ledger:
        ledger.derive(
            "traffic.decode.engram_tables_bytes", "concurrency * engram.bytes_per_token", "B",
            f"{_TRAFFIC} a step",
        )  # fmt: skip


def _add_times(ledger: Ledger, phase: Phase, placement: Placement) -> None:
    terms = []
    for tier in placement.tiers:
        first = tier is placement.first
        read = [f"traffic.{phase}.{name}_bytes" for name in placement.in_place(tier.place)]
        names = [name for name in read if name in ledger]
        if first and phase == "decode":
            names.append("traffic.decode.rows_bytes")
        if not names:
            continue
        name = f"roofline.{phase}.{tier.place}_seconds"
        bandwidth = _BANDWIDTH["first" if first else tier.place]
        if tier.place == "ssd":  # one drive serves all ranks, a whole sector at a time
            names = [_from_disk(phase, name) for name in names]
        ledger.derive(name, f"({' + '.join(names)}) / {bandwidth}", "s", _BOUND)
        terms.append(name)
    flops = "flops.prefill.total" if phase == "prefill" else "concurrency * flops.decode_token"
    ledger.derive(
        f"roofline.{phase}.compute_seconds",
        f"{flops} / (machine.devices * machine.flops)",
        "s",
        _BOUND,
    )
    terms.append(f"roofline.{phase}.compute_seconds")
    total = "seconds" if phase == "prefill" else "step_seconds"
    ledger.derive(f"roofline.{phase}.{total}", f"max({', '.join(terms)})", "s", _BOUND)


def _from_disk(phase: Phase, traffic: str) -> str:
    """What an SSD reads for some traffic: whole sectors, and experts that RAM does not cache."""
    if "engram" in traffic:
        tokens = "phases.encode.tokens" if phase == "prefill" else "concurrency"
        return f"{tokens} * engram.sector_bytes_per_token"
    if "routed_experts" in traffic:
        return f"rank.ways * {traffic} * (1 - cache.routed_experts_share)"
    return f"rank.ways * {traffic}"


def bound(ledger: Ledger, phase: Phase) -> str:
    """What bounds a phase, in words."""
    group = f"roofline.{phase}."
    times = {
        name.removeprefix(group).removesuffix("_seconds"): ledger[name]
        for name in ledger
        if name.startswith(group) and name.removeprefix(group).removesuffix("_seconds") in BOUNDS
    }
    return BOUNDS[max(times, key=lambda key: times[key])]
