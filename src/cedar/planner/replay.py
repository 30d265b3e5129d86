"""Rows of a prefill as formulas: what decoder layers run in each mode, what a prefix hit runs again.

A decoder layer WRITES window rows for some tokens and answers QUERIES for the last of them:

    full    every row
    report  the last n rows, windows clipped at the tail
    cut     as report, but the first decoder layer writes window - 1 rows more
    exact   the pyramid that loses nothing: window - 1 rows more for each layer above

The last layer answers for the final row only. Source: section 8 of the architecture's specification.
"""

from __future__ import annotations

from dataclasses import dataclass

from cedar.config.layer_plan import LayerPlan
from cedar.planner.request import DecoderPrefill, Request


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Formulas of one decoder layer's rows: window rows written and queries answered."""

    write: str
    query: str


def decoder_rows(plan: LayerPlan, mode: DecoderPrefill) -> list[LayerRows]:
    """Rows of each decoder layer in prefill, as formulas over the lines of `add_phases`.

    After a hit so few rows may run that a deep replay cannot start: then every layer runs them all.
    """
    layers = len(plan.decoder)
    tail = LayerRows("phases.replay.tail", "phases.replay.tail")
    if mode == "exact":
        cone = [
            _reach(f"model.window + {layers - 1 - j} * (model.window - 1)") for j in range(layers)
        ]
        rows = [LayerRows(*pair) for pair in zip(cone, [*cone[1:], cone[-1]], strict=True)]
    elif mode == "cut" and layers:
        all_or_tail = _or_all("phases.replay.tail")
        first = _reach("phases.replay.tail + model.window - 1")
        rows = [LayerRows(first, all_or_tail)] + [LayerRows(all_or_tail, all_or_tail)] * (
            layers - 1
        )
    else:
        rows = [tail] * layers
    if rows:
        rows[-1] = LayerRows(rows[-1].write, "1")
    return rows


def _or_all(rows: str) -> str:
    return f"max({rows}, phases.replay.short * phases.encode.tokens)"


def _reach(rows: str) -> str:
    return _or_all(f"min(phases.encode.tokens, {rows})")


def first_rows(plan: LayerPlan, mode: DecoderPrefill) -> str:
    """Boundary rows a mode wants for its first decoder layer, before clipping."""
    return {
        "full": f"{len(plan.decoder)} * (model.window - 1) + max(1, input_tokens - cached_tokens)",
        "report": "model.window * replay_windows",
        "cut": "model.window * replay_windows + model.window - 1",
        "exact": f"model.window + {len(plan.decoder) - 1} * (model.window - 1)",
    }[mode]


def decoder_mode(request: Request, *, ced: bool) -> DecoderPrefill:
    """The mode that runs: without CED every decoder row runs."""
    return request.decoder_prefill if ced else "full"


def replayed_prefix(plan: LayerPlan, request: Request, mode: DecoderPrefill) -> str:
    """Prefix tokens run again after a hit, as a formula."""
    if request.encoder_replay == "bounded":
        return "min(cached_tokens, model.window * encoder_replay_windows)"
    beyond = f"min({first_rows(plan, mode)}, input_tokens) - (input_tokens - cached_tokens)"
    below = "model.encoder_layers * (model.window - 1)"
    return f"min(cached_tokens, {below} + max(1, {beyond}))"
