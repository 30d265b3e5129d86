"""Bytes of a request in memory: global KV (the slope), windows (the intercept), weights, scratch.

Row bytes come from `formats.rows`; here they are only multiplied. Slope and intercept are separate
lines everywhere: windows never grow with the context and are never charged as if they did.
"""

from __future__ import annotations

from cedar.config.layer_plan import LayerPlan
from cedar.planner.expression import total_of
from cedar.planner.ledger import Ledger
from cedar.planner.model_lines import owner_terms

_POOL = "rows of the KV owners; reuse, reindex and window layers own none"

#: Most that the operators hold of gathered rows and index scores: six tiles of 64 MiB.
TILE_BYTES = 6 * 64 * 2**20
#: Process, libraries and allocator slack that no formula here predicts.
ALLOWANCE_BYTES = 512 * 2**20


def add_memory(ledger: Ledger, plan: LayerPlan, write_rows: str) -> None:
    """Add KV, windows, open groups, boundary stash, scratch and their sum per sequence.

    Args:
        write_rows: formula of the boundary rows stashed for the decoder replay, "0" without one.
    """
    _add_slope(ledger, plan)
    _add_blocks(ledger, plan)
    _add_intercept(ledger, plan, write_rows)
    _add_scratch(ledger)


def _add_slope(ledger: Ledger, plan: LayerPlan) -> None:
    rates: dict[str, list[str]] = {"encoder": [], "decoder": []}
    for spec in plan.kv_owners:
        rates[spec.side].append(f"1 / {spec.compress_ratio}")
    for side, terms in rates.items():
        ledger.derive(
            f"kv_per_token.{side}", f"rows.global_bytes * ({total_of(terms)})", "B/token",
            f"{_POOL}; owners of the {side}",
        )  # fmt: skip
    ledger.derive(
        "kv_bytes_per_token", "kv_per_token.encoder + kv_per_token.decoder", "B/token",
        "slope of the KV cache",
    )  # fmt: skip
    ledger.derive(
        "kv_per_token.rows", "kv_bytes_per_token / rows.global_bytes", "rows/token", "row rate"
    )
    for kind in ("main", "index"):
        ledger.derive(
            f"kv_per_token.{kind}",
            f"kv_bytes_per_token * rows.{kind}_bytes / rows.global_bytes", "B/token",
            f"{kind} rows",
        )  # fmt: skip
    ledger.derive(
        "kv_bytes", f"rows.global_bytes * ({owner_terms(plan, 'total_tokens')})", "B",
        f"{_POOL}; complete groups of one sequence after its last token",
    )  # fmt: skip


def _add_blocks(ledger: Ledger, plan: LayerPlan) -> None:
    ledger.derive(
        "kv_block_bytes", f"rows.global_bytes * ({owner_terms(plan, 'block_size')})", "B",
        "one block of every owner",
    )  # fmt: skip
    ledger.derive(
        "kv_blocks", "ceil_div(total_tokens, block_size)", "blocks", "whole blocks are held"
    )
    ledger.derive(
        "kv_allocated_bytes", "kv_blocks * kv_block_bytes", "B", "KV of one sequence, block-rounded"
    )


def _add_intercept(ledger: Ledger, plan: LayerPlan, write_rows: str) -> None:
    ledger.derive(
        "window_bytes", "model.layers * model.window * rows.window_bytes", "B",
        "one ring per backbone layer and sequence, whatever the context",
    )  # fmt: skip
    ledger.derive(
        "draft_window_bytes", "model.draft_layers * model.window * rows.window_bytes", "B",
        "rings of the draft layers; only when drafting",
    )  # fmt: skip
    open_rows = total_of(str(spec.compress_ratio - 1) for spec in plan.kv_owners)
    ledger.derive(
        "open_group_bytes", f"({open_rows}) * 2 * model.head_dim * 4", "B",
        "up to ratio - 1 rows of (kv, gate) in fp32 per owner",
    )  # fmt: skip
    ledger.derive(
        "boundary_bytes", f"({write_rows}) * model.copies * (model.hidden * 2 + 4)", "B",
        "bf16 stream and fp32 pre-mix of rows kept for the decoder replay, while a prompt is read",
    )  # fmt: skip
    ledger.derive(
        "sequence_fixed_bytes", "window_bytes + open_group_bytes", "B",
        "intercept: what one sequence holds before its first KV row",
    )  # fmt: skip
    ledger.derive(
        "sequence_bytes",
        "sequence_fixed_bytes + kv_allocated_bytes",
        "B",
        "one sequence at its end",
    )
    ledger.derive(
        "sequences_bytes", "concurrency * sequence_bytes", "B", "all sequences at their end"
    )


def _add_scratch(ledger: Ledger) -> None:
    ledger.derive(
        "prefill_chunk", "min(max_num_batched_tokens, phases.encode.tokens)", "tokens",
        "rows of one prefill chunk",
    )  # fmt: skip
    source = "bf16 activations alive inside one layer; an upper estimate, not a measured peak"
    ledger.derive(
        "scratch.stream_bytes", "prefill_chunk * 2 * model.copies * model.hidden * 2", "B",
        f"stream in and out; {source}",
    )  # fmt: skip
    ledger.derive(
        "scratch.heads_bytes", "prefill_chunk * 2 * model.heads * model.head_dim * 2", "B",
        f"queries and outputs; {source}",
    )  # fmt: skip
    ledger.derive(
        "scratch.experts_bytes",
        "prefill_chunk * (model.experts_per_token + 1) * model.expert_width * (2 * 4 + 2)", "B",
        f"gate and up in fp32, their product in bf16; {source}",
    )  # fmt: skip
    ledger.add(
        "scratch.tile_bytes", TILE_BYTES, "B", "6 tiles of 64 MiB: gathered rows, index scores",
        "tile limit of the reference operators, which take queries in tiles whatever the context",
    )  # fmt: skip
    ledger.derive(
        "scratch.logits_bytes", "concurrency * model.vocab * 4", "B", "one fp32 row a sequence"
    )
    parts = [f"scratch.{part}_bytes" for part in ("stream", "heads", "experts", "tile", "logits")]
    ledger.derive(
        "scratch.total_bytes", " + ".join([*parts, "boundary_bytes"]), "B",
        "sum of the parts and the boundary rows of the one prompt being read",
    )  # fmt: skip
    ledger.add(
        "allowance_bytes", ALLOWANCE_BYTES, "B",
        "stated allowance for the process, its libraries and the allocator",
        "236 MB measured after importing torch and cedar, the rest is slack", "given",
    )  # fmt: skip
