"""Bytes of a prefix on disk, against a cache that also stores windows; replaying against restoring.

cedar persists global rows only. The baseline is the previous generation's policy: every layer's own
rows, and all windows at each stored boundary.
"""

from __future__ import annotations

from cedar.config.layer_plan import LayerPlan
from cedar.planner.compute import scored_rows, selected_rows
from cedar.planner.expression import total_of
from cedar.planner.ledger import Ledger
from cedar.planner.model_lines import owner_terms
from cedar.planner.weights import PRODUCTS

#: Tokens per turn at which the ratio to the baseline is tabulated.
TURNS = (128, 256, 512, 760, 1024, 2048, 4096, 16384)


def add_storage(ledger: Ledger, plan: LayerPlan, unshared: LayerPlan) -> None:
    """Add persisted bytes, the window-storing baseline and the cost of a hit.

    Args:
        unshared: the same model with every non-window layer full; the baseline's rows.
    """
    ledger.derive(
        "persisted_bytes", f"rows.global_bytes * ({owner_terms(plan, 'total_tokens')})", "B",
        "all global rows of the sequence and nothing else: no windows, no open groups",
    )  # fmt: skip
    ledger.derive(
        "store.complete_block_bytes", "total_tokens // block_size * kv_block_bytes", "B",
        "what is written while the last block is still open",
    )  # fmt: skip
    rates = total_of(f"1 / {spec.compress_ratio}" for spec in unshared.kv_owners)
    ledger.derive(
        "store.baseline_bytes_per_token", f"rows.global_bytes * ({rates})", "B/token",
        "the same model without sharing: every non-window layer owns its rows",
    )  # fmt: skip
    ledger.derive(
        "store.boundaries", "ceil_div(total_tokens, tokens_per_turn)", "boundaries",
        "one every tokens_per_turn, and one at the end",
    )  # fmt: skip
    ledger.derive(
        "store.baseline_bytes",
        "store.baseline_bytes_per_token * total_tokens + store.boundaries * window_bytes", "B",
        "unshared rows, and all windows at every boundary",
    )  # fmt: skip
    ledger.derive(
        "store.share",
        "persisted_bytes / store.baseline_bytes",
        "",
        "cedar's bytes / the baseline's",
    )
    for tokens in TURNS:
        ledger.derive(
            f"store.turn_share.t{tokens}",
            f"kv_bytes_per_token * {tokens} / "
            f"(store.baseline_bytes_per_token * {tokens} + window_bytes)",
            "", f"share of the baseline when boundaries are {tokens} tokens apart",
        )  # fmt: skip
    if ledger["store.baseline_bytes_per_token"]:
        ledger.derive(
            "store.windows_equal_rows_at", "window_bytes / store.baseline_bytes_per_token",
            "tokens", "distance of boundaries at which windows weigh as much as rows",
        )  # fmt: skip
    if 8 * ledger["kv_bytes_per_token"] > ledger["store.baseline_bytes_per_token"]:
        ledger.derive(
            "store.eighth_at",
            "window_bytes / (8 * kv_bytes_per_token - store.baseline_bytes_per_token)", "tokens",
            "distance of boundaries at which the share is 1/8; less apart, less than 1/8",
        )  # fmt: skip


def add_hit(ledger: Ledger, plan: LayerPlan, *, skips_decoder: bool) -> None:
    """Add what one prefix hit costs: rows run again, or windows read back.

    Generic cost of a hit at least one replay long, at the end of this request's prompt.
    """
    sides = ("encoder",) if skips_decoder else ("encoder", "decoder")
    layers = " + ".join(f"model.{side}_layers" for side in sides)
    ledger.derive(
        "hit.replay_rows", "min(input_tokens, model.window * encoder_replay_windows)", "tokens",
        "bounded replay of the last rows of the prefix",
    )  # fmt: skip
    ledger.derive(
        "hit.exact_rows", f"min(input_tokens, ({layers}) * (model.window - 1) + 1)", "tokens",
        "every layer widens the dependence by window - 1 rows",
    )  # fmt: skip
    ledger.derive(
        "hit.replay_token_layers", f"hit.replay_rows * ({layers})", "tokens x layers",
        "layers whose windows are rebuilt; under CED the decoder's come from its own tail",
    )  # fmt: skip
    ledger.derive(
        "hit.restore_bytes", f"({layers}) * model.window * rows.window_bytes", "B",
        "what a window-storing cache reads instead",
    )  # fmt: skip
    specs = [*plan.encoder, *(() if skips_decoder else plan.decoder)]
    first = "input_tokens - hit.replay_rows"
    macs = [f"macs.{side}.{name}" for side in sides for name in PRODUCTS]
    scored = total_of(scored_rows(spec, "input_tokens", first) for spec in specs)
    selected = total_of(selected_rows(spec, "input_tokens", first) for spec in specs)
    window = f"({layers}) * seen(hit.replay_rows, 1, model.window)"
    ledger.derive(
        "hit.replay_flops",
        f"2 * hit.replay_rows * ({' + '.join(macs)})"
        f" + 2 * model.index_heads * model.index_head_dim * ({scored})"
        f" + 4 * model.heads * model.head_dim * ({selected} + {window})",
        "FLOP", "the replayed rows in full: projections, experts, index scoring, attention",
    )  # fmt: skip
