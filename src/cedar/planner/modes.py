"""CED in its modes: what each runs in prefill, and the prompt length below which it does not pay.

The lengths are found by bisection over the ledger: the same formulas at other prompt lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cedar.planner.flows import FlowPlan, Planner, Site
from cedar.planner.request import DECODER_PREFILL, DecoderPrefill, Flow, Request

_FLOPS, _SECONDS = "flops.prefill.total", "roofline.prefill.seconds"


@dataclass(frozen=True, slots=True)
class ModePlan:
    """One mode of the decoder's prefill under CED.

    Attributes:
        mode: full, report, cut or exact.
        plan: its plan for the request.
        flops_share: its prefill FLOPs / those of `full`.
        no_gain_up_to: longest prompt at which it needs as many FLOPs as `full`; None for `full`.
        tenth_saved_from: shortest prompt at which it saves a tenth of the FLOPs; None if none does.
        pays_from: shortest prompt at which the roofline time saved exceeds the stated overhead;
            None without a machine that fits, or if no prompt does.
    """

    mode: DecoderPrefill
    plan: FlowPlan
    flops_share: float
    no_gain_up_to: int | None
    tenth_saved_from: int | None
    pays_from: int | None

    def to_dict(self) -> dict[str, Any]:
        """The mode as JSON data."""
        ledger = self.plan.ledger
        return {
            "replay_tokens": ledger["phases.replay.tokens"],
            "decoder_token_layers": ledger["decoder_token_layers"],
            "prefill_flops": ledger[_FLOPS],
            "prefill_flops_share": self.flops_share,
            "boundary_bytes": ledger["boundary_bytes"],
            "prefill_seconds": ledger.get(_SECONDS),
            "no_gain_up_to": self.no_gain_up_to,
            "tenth_saved_from": self.tenth_saved_from,
            "pays_from": self.pays_from,
        }


def ced_modes(
    planner: Planner, request: Request, flow: Flow, site: Site | None, *, overhead_seconds: float
) -> tuple[ModePlan, ...]:
    """Every mode of a CED flow on this request.

    Args:
        overhead_seconds: fixed time a mode other than `full` costs more (launches, an eager path);
            the roofline knows none, measured engines report some.
    """
    plans = {mode: planner.plan(_in_mode(request, mode), flow, site) for mode in DECODER_PREFILL}
    return tuple(_mode(plans[mode], plans["full"], overhead_seconds) for mode in DECODER_PREFILL)


def _in_mode(request: Request, mode: DecoderPrefill) -> Request:
    windows = 1 if mode in ("full", "exact") else request.replay_windows
    return replace(request, decoder_prefill=mode, replay_windows=windows)


def _mode(plan: FlowPlan, full: FlowPlan, overhead: float) -> ModePlan:
    mode = plan.request.decoder_prefill
    share = plan.ledger[_FLOPS] / full.ledger[_FLOPS]
    if mode == "full":
        return ModePlan(mode, plan, share, None, None, None)
    limit = plan.config.max_position_embeddings - plan.request.output_tokens

    def at(which: FlowPlan, name: str, tokens: int) -> float:
        return which.ledger.value_at(name, {"input_tokens": tokens})

    def saves(tokens: int) -> bool:
        return at(plan, _FLOPS, tokens) < at(full, _FLOPS, tokens)

    def saves_a_tenth(tokens: int) -> bool:
        return at(plan, _FLOPS, tokens) <= 0.9 * at(full, _FLOPS, tokens)

    def pays(tokens: int) -> bool:
        return at(full, _SECONDS, tokens) - at(plan, _SECONDS, tokens) > overhead

    first = _first(saves, limit)
    timed = _SECONDS in plan.ledger and _SECONDS in full.ledger
    return ModePlan(
        mode=mode,
        plan=plan,
        flops_share=share,
        no_gain_up_to=limit if first is None else first - 1,
        tenth_saved_from=_first(saves_a_tenth, limit),
        pays_from=_first(pays, limit) if timed else None,
    )


def _first(holds: Callable[[int], bool], limit: int) -> int | None:
    """Smallest number in 1..limit from which `holds` is true, by bisection; None if never."""
    if not holds(limit):
        return None
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
