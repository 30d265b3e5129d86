"""The four flows by name: two switches on a config. Used by the CLI, the planner and benchmarks."""

from __future__ import annotations

from typing import Final, Literal

from cedar.config.model_config import ModelConfig

Flow = Literal["none", "ced", "csa2", "ced+csa2"]

#: flow -> (ced, csa2), in the order the article tells them.
FLOWS: Final[dict[Flow, tuple[bool, bool]]] = {
    "none": (False, False),
    "ced": (True, False),
    "csa2": (False, True),
    "ced+csa2": (True, True),
}


def flow_config(config: ModelConfig, flow: Flow) -> ModelConfig:
    """The config with the flow's switches set; `ced+csa2` of a released plan is that plan."""
    ced, csa2 = FLOWS[flow]
    return config.variant(ced=ced, csa2=csa2)


def flow_name(config: ModelConfig) -> Flow:
    """Which flow a config is: CED if prefill may skip the decoder, CSA2 if any layer borrows rows."""
    ced = config.plan.ced_blocker is None
    csa2 = any(spec.role in ("reindex", "reuse") for spec in config.plan.layers)
    return next(flow for flow, switches in FLOWS.items() if switches == (ced, csa2))
