"""A whole plan as data: the versioned JSON document, and formulas as a program for the page.

`PlanReport` gathers what `cedar plan` answers; `render` turns it into text or Markdown, `to_json`
into the document whose keys are a public interface.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cedar.planner.fit import Placement
from cedar.planner.flows import FlowPlan, Planner, Site
from cedar.planner.ledger import Ledger
from cedar.planner.model_lines import MODEL_GROUPS
from cedar.planner.modes import ModePlan, ced_modes
from cedar.planner.quoted import Difference, differences, generations
from cedar.planner.request import FLOWS, Flow, Request
from cedar.planner.weights import CAN_LIVE

#: Name and version of the document; a version never changes the meaning of a key.
SCHEMA = "cedar.plan"
SCHEMA_VERSION = 1

#: Request numbers of the ledger; they stand once in the document, under `request`.
_REQUEST = ("input_tokens", "output_tokens", "concurrency", "hit_rate", "cached_tokens",
            "block_size", "max_num_batched_tokens", "tokens_per_turn", "replay_windows",
            "encoder_replay_windows")  # fmt: skip


@dataclass(frozen=True)
class PlanReport:
    """Everything one `cedar plan` answers.

    Attributes:
        planner: the model.
        request: what is run.
        flows: plans of the flows that were asked for and that the model can run.
        unavailable: the others that were asked for, and why they cannot run.
        primary: the flow that machine, modes and explanations speak about.
        modes: CED in its modes; empty for a flow without CED.
    """

    planner: Planner
    request: Request
    flows: Mapping[Flow, FlowPlan]
    unavailable: Mapping[Flow, str]
    primary: Flow
    modes: tuple[ModePlan, ...]

    @property
    def main(self) -> FlowPlan:
        """The plan of the primary flow."""
        return self.flows[self.primary]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where the article and the release differ, when this model is one of them."""
        return differences(self.planner.family)


def make_report(
    planner: Planner, request: Request, flow: Flow | None = None, site: Site | None = None,
    *, overhead_seconds: float = 0.0,
) -> PlanReport:  # fmt: skip
    """Plan one flow, or all that the model can run when `flow` is None.

    Raises:
        UsageError: the flow asked for is not possible; RequestError: the request is too long.
    """
    primary = flow or planner.default_flow
    if flow is None:
        plans: Mapping[Flow, FlowPlan] = planner.plan_all(request, site)
    else:
        plans = {flow: planner.plan(request, flow, site)}
    reasons = {name: planner.blocker(name) for name in FLOWS if flow is None}
    modes: tuple[ModePlan, ...] = ()
    if "ced" in primary:
        modes = ced_modes(planner, request, primary, site, overhead_seconds=overhead_seconds)
    return PlanReport(
        planner=planner,
        request=request,
        flows=plans,
        unavailable={name: reason for name, reason in reasons.items() if reason is not None},
        primary=primary,
        modes=modes,
    )


def to_json(report: PlanReport, *, explain: bool = False) -> dict[str, Any]:
    """The document of `cedar plan --json`: plain numbers in bytes, tokens, seconds and FLOPs.

    Args:
        explain: also list every ledger line of every flow, with formula, inputs, kind and source.
    """
    flows: dict[str, Any] = {
        flow: _flow(plan, explain=explain) for flow, plan in report.flows.items()
    }
    flows |= {flow: {"unavailable": reason} for flow, reason in report.unavailable.items()}
    ledger = report.main.ledger
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": _model(report),
        "request": {
            **{name: ledger[name] for name in _REQUEST},
            "decoder_prefill": report.request.decoder_prefill,
            "encoder_replay": report.request.encoder_replay,
        },
        "primary_flow": report.primary,
        "flows": flows,
        "ced_modes": {mode.mode: mode.to_dict() for mode in report.modes},
        "machine": _machine(report.main),
        "generations_kv_bytes_per_token": generations(),
        "differences": [
            {"topic": d.topic, "article": d.article, "release": d.release}
            for d in report.differences
        ],
    }


def _flow(plan: FlowPlan, *, explain: bool) -> dict[str, Any]:
    values = plan.ledger.nested(without=(*MODEL_GROUPS, "machine"))
    for name in _REQUEST:
        values.pop(name, None)
    values.setdefault("quoted", {})
    values["activated_prefill"] = plan.ledger["activated_prefill"]
    values["fits"] = plan.fits
    values["placement"] = None if plan.placement is None else placement_dict(plan.placement)
    values["bounds"] = dict(plan.bounds)
    if explain:
        values["ledger"] = [line.to_dict() for line in plan.ledger.lines]
    return values


def placement_dict(placement: Placement) -> dict[str, Any]:
    """Where each class of weights lives, as JSON data."""
    return {
        name: {"home": home, "bytes": placement.sizes[name], "can_live": list(CAN_LIVE[name][0])}
        for name, home in placement.homes.items()
    }


def _model(report: PlanReport) -> dict[str, Any]:
    ledger, model = report.main.ledger, report.planner.model
    totals = ("backbone", "engram_tables", "engram", "vision", "draft", "total")
    return {
        "name": model.name,
        "family": report.planner.family,
        "num_hidden_layers": ledger["model.layers"],
        "num_encoder_layers": ledger["model.encoder_layers"],
        "kv_owners": [spec.layer_id for spec in report.main.config.plan.kv_owners],
        "parameters": {name: ledger[f"parameters.{name}"] for name in totals},
        "weights_from": "schema" if model.measured is None else "headers",
        "tensors": model.tensors,
        "unknown_tensors": list(model.unknown),
        "missing_tensors": list(model.missing),
        "differing_tensors": list(model.differing),
    }


def _machine(plan: FlowPlan) -> dict[str, Any] | None:
    if plan.site is None:
        return None
    machine = plan.site.machine
    return {
        "name": machine.name,
        "title": machine.title,
        "kind": machine.kind,
        "source": machine.source,
        **plan.ledger.nested()["machine"],
    }


def to_program(ledger: Ledger) -> list[dict[str, Any]]:
    """The ledger as a program: constants with values, then formulas, each over lines above it.

    Evaluating it in order with other values for the request's constants gives the same numbers as
    planning that request; the language is that of `expression`.
    """
    return [
        {"name": line.name, "unit": line.unit, "kind": line.kind, "source": line.source}
        | (
            {"formula": line.formula}
            if line.inputs
            else {"value": line.value, "words": line.formula}
        )
        for line in ledger.lines
    ]


def grid(
    plan: FlowPlan, names: Iterable[str], inputs: Iterable[int], outputs: Iterable[int]
) -> list[dict[str, Any]]:
    """The named lines of a plan at every pair of prompt and answer lengths."""
    wanted, answers = list(names), list(outputs)
    rows = []
    for input_tokens in inputs:
        for output_tokens in answers:
            changes = {"input_tokens": input_tokens, "output_tokens": output_tokens}
            values = plan.ledger.with_values(changes)
            rows.append(changes | {name: values[name] for name in wanted})
    return rows
