"""The planner's front door: a model x a request x a flow x a machine gives a `FlowPlan`.

    planner = Planner(resolve_model("preset:article"))
    planner.plan(Request(input_tokens=30_000, output_tokens=1_000), "ced+csa2").ledger["kv_bytes"]

Callers: `cedar plan`, the page (through `export`), `cedar compare` (predicted beside measured).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cedar.config import ModelConfig
from cedar.errors import DoesNotFitError, UsageError
from cedar.planner.compute import add_phases, add_request, add_work
from cedar.planner.fit import Placement, add_fit, place, refusal
from cedar.planner.hardware import Machine
from cedar.planner.ledger import Ledger
from cedar.planner.memory import add_memory
from cedar.planner.model_lines import add_model
from cedar.planner.quoted import Family, add_quotes, family
from cedar.planner.replay import decoder_mode
from cedar.planner.request import FLOWS, Flow, Request, flow_switches
from cedar.planner.residency import add_ranks, add_reads, add_weights
from cedar.planner.roofline import Phase, add_roofline, bound
from cedar.planner.source import PlannedModel
from cedar.planner.storage import add_hit, add_storage
from cedar.planner.weights import ModelWeights, Place, WeightClass, weigh


@dataclass(frozen=True)
class Site:
    """A machine and how the model is laid out on it.

    Attributes:
        machine: where it would run.
        wanted: classes of weights that must live in one place; the rest is placed by `fit.place`.
        pinned: n-gram tables in RAM beside accelerators are page-locked.
        expert_alignment: columns a tensor-parallel rank pads an expert's width to.
    """

    machine: Machine
    wanted: Mapping[WeightClass, Place] = field(default_factory=dict)
    pinned: bool = False
    expert_alignment: int = 32


@dataclass(frozen=True)
class FlowPlan:
    """The plan of one flow.

    Attributes:
        flow: which.
        config: the model with the flow's switches set.
        request: what is run.
        ledger: every number, with formula, inputs, kind and source.
        site, placement: the machine and where weights live on it; None without a machine.
        bounds: what bounds prefill and decode there.
    """

    flow: Flow
    config: ModelConfig
    request: Request
    ledger: Ledger
    site: Site | None = None
    placement: Placement | None = None
    bounds: Mapping[Phase, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether it fits the machine; None without a machine."""
        return None if self.placement is None else self.placement.fits

    def refusal(self) -> DoesNotFitError | None:
        """Why it does not fit, by how much and what would help; None when it does."""
        if self.site is None or self.placement is None or self.placement.fits:
            return None
        return refusal(self.ledger, self.site.machine, self.placement)


class Planner:
    """Plans requests of one model; its weights are counted once.

    Args:
        model: a resolved model, or a bare config.
    """

    def __init__(self, model: PlannedModel | ModelConfig) -> None:
        self.model = model if isinstance(model, PlannedModel) else PlannedModel("config", model)
        self.family: Family = family(self.model.config)
        self._weights: dict[bool, ModelWeights] = {}

    @property
    def config(self) -> ModelConfig:
        """The model as given, before any flow's switches."""
        return self.model.config

    def weights(self, *, csa2: bool) -> ModelWeights:
        """Counted weights of the shared or the unshared plan."""
        if csa2 not in self._weights:
            self._weights[csa2] = weigh(self.config.variant(ced=False, csa2=csa2))
        return self._weights[csa2]

    def blocker(self, flow: Flow) -> str | None:
        """Why this model cannot run a flow; None if it can."""
        ced, csa2 = flow_switches(flow)
        return self.config.variant(ced=True, csa2=csa2).plan.ced_blocker if ced else None

    @property
    def default_flow(self) -> Flow:
        """The flow the model is meant for: both ideas on, or CSA2 alone where CED cannot run."""
        return "csa2" if self.blocker("ced+csa2") else "ced+csa2"

    def plan(self, request: Request, flow: Flow, site: Site | None = None) -> FlowPlan:
        """Plan one flow.

        Raises:
            UsageError: the flow is unknown, or this model cannot run it.
            RequestError: the request is longer than the model's context.
        """
        ced, csa2 = flow_switches(flow)
        blocker = self.blocker(flow)
        if blocker is not None:
            possible = ", ".join(name for name in FLOWS if self.blocker(name) is None)
            raise UsageError(
                f"flow {flow!r} is not possible: {blocker}; possible flows: {possible}"
            )
        request.check(self.config)
        config = self.config.variant(ced=ced, csa2=csa2)
        weights = self.weights(csa2=csa2)
        ledger = self._ledger(config, weights, request, ced=ced, csa2=csa2)
        if site is None:
            return FlowPlan(flow, config, request, ledger)
        return self._on_site(FlowPlan(flow, config, request, ledger, site), site, weights)

    def plan_all(self, request: Request, site: Site | None = None) -> dict[Flow, FlowPlan]:
        """Plan every flow this model can run, in the order none, ced, csa2, ced+csa2."""
        return {
            flow: self.plan(request, flow, site) for flow in FLOWS if self.blocker(flow) is None
        }

    def _ledger(
        self, config: ModelConfig, weights: ModelWeights, request: Request, *, ced: bool, csa2: bool
    ) -> Ledger:
        plan, mode, ledger = config.plan, decoder_mode(request, ced=ced), Ledger()
        add_model(ledger, config, weights)
        add_request(ledger, request)
        steps = add_phases(ledger, plan, request, mode)
        add_work(ledger, plan, steps, mode)
        add_memory(ledger, plan, steps[0].write if mode != "full" else "0")
        unshared = self.config.variant(ced=ced, csa2=False).plan
        add_storage(ledger, plan, unshared)
        add_hit(ledger, plan, skips_decoder=mode != "full")
        # Headers describe the weights as they are, not those a switched-off CSA2 would need.
        add_weights(ledger, weights, self.model.measured if csa2 else None)
        add_reads(ledger, config, weights)
        add_quotes(ledger, self.family, ced=ced, csa2=csa2)
        return ledger

    def _on_site(self, plan: FlowPlan, site: Site, weights: ModelWeights) -> FlowPlan:
        ledger, machine = plan.ledger, site.machine
        if site.pinned and not machine.accelerator:
            raise UsageError("pinned memory needs an accelerator; this machine has none")
        add_ranks(ledger, plan.config, weights, machine.devices, site.expert_alignment)
        placement = place(ledger, machine, site.wanted, pinned=site.pinned)
        add_fit(ledger, machine, placement, max_context=plan.config.max_position_embeddings)
        if not placement.fits:
            return replace(plan, placement=placement)
        skips = decoder_mode(plan.request, ced="ced" in plan.flow) != "full"
        add_roofline(ledger, placement, weights, skips_decoder=skips)
        bounds: dict[Phase, str] = {phase: bound(ledger, phase) for phase in ("prefill", "decode")}
        return replace(plan, placement=placement, bounds=bounds)


def plan_request(
    config: ModelConfig, request: Request, flow: Flow, machine: Machine | None = None
) -> FlowPlan:
    """Plan one flow of one request; see `Planner.plan`."""
    return Planner(config).plan(request, flow, None if machine is None else Site(machine))


def plan_all_flows(
    config: ModelConfig, request: Request, machine: Machine | None = None
) -> dict[Flow, FlowPlan]:
    """Plan every flow this model can run; see `Planner.plan_all`."""
    return Planner(config).plan_all(request, None if machine is None else Site(machine))
