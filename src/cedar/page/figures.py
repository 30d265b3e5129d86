"""What the ten figures are drawn from: layer plans and ledger formulas of models, as JSON data.

The page holds no numbers of its own. For every model and flow it gets the planner's ledger as a
program (`planner.export.to_program`) and, for every layer, formulas over lines of that ledger; it
evaluates both for the request that its controls show. Lines and sets of formulas repeat from flow
to flow, so they are stored once and referred to by position. Layout and words live in `static/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cedar.config.layer_plan import LayerPlan, LayerSpec
from cedar.planner.compute import scored_rows, selected_rows
from cedar.planner.export import to_program
from cedar.planner.flows import FlowPlan, Planner
from cedar.planner.quoted import differences
from cedar.planner.replay import LayerRows, decoder_mode, decoder_rows
from cedar.planner.request import FLOWS, Flow, Request

#: Name and version of the page's data; the scripts in `static/` refuse any other.
SCHEMA = "cedar.page"
SCHEMA_VERSION = 1

#: Models a page shows when none is asked for: the article's plan, the release's, the article's on a
#: body that runs anywhere, and the model that ships with cedar.
DEFAULT_MODELS = ("preset:article", "preset:v4.1-flash", "preset:article-thin", "nano")

#: Request numbers that the page's controls set.
CONTROLS = ("input_tokens", "output_tokens", "tokens_per_turn")

#: Figures beside which a difference of article and release is worth a note, by its topic.
NOTES = {
    "KV owners of the decoder": (1, 6),
    "bytes per token": (6,),
    "baseline per token": (7,),
    "persisted prefix": (10,),
    "decoder in prefill": (3,),
    "prefill activation": (5, 8),
    "conversion module": (6,),
    "layers": (1,),
    "windows": (4,),
}

# Programs do not depend on the request's numbers, which are the page's to set.
_ANY_REQUEST = Request(input_tokens=1, output_tokens=1)


@dataclass
class _Interned:
    """Values in order of first use, each once."""

    values: list[Any] = field(default_factory=list)
    _positions: dict[str, int] = field(default_factory=dict)

    def position(self, value: Any) -> int:
        """Where `value` stands, adding it when it is new."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._positions:
            self._positions[key] = len(self.values)
            self.values.append(value)
        return self._positions[key]


def page_data(planners: Iterable[Planner], request: Request, flow: Flow) -> dict[str, Any]:
    """Everything the figures need, as JSON data.

    Args:
        planners: the models to choose from, the first is shown first.
        request, flow: what the controls show first.

    Raises:
        RequestError: the request is longer than the first model's context.
    """
    lines, formulas = _Interned(), _Interned()
    models = []
    for position, planner in enumerate(planners):
        if position == 0:
            request.check(planner.config)
        models.append(_model(planner, lines, formulas))
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "controls": {name: getattr(request, name) for name in CONTROLS} | {"flow": flow},
        "flows": list(FLOWS),
        "lines": lines.values,
        "formulas": formulas.values,
        "models": models,
    }


def _model(planner: Planner, lines: _Interned, formulas: _Interned) -> dict[str, Any]:
    flows: dict[str, Any] = {}
    for flow in FLOWS:
        blocker = planner.blocker(flow)
        if blocker is not None:
            flows[flow] = {"unavailable": blocker}
            continue
        plan = planner.plan(_ANY_REQUEST, flow)
        flows[flow] = {
            "program": [lines.position(line) for line in to_program(plan.ledger)],
            "layers": flow_layers(plan, formulas),
        }
    return {
        "name": planner.model.name,
        "family": planner.family,
        "max_tokens": planner.config.max_position_embeddings,
        "encoder_layers": planner.config.plan.num_encoder_layers,
        "flows": flows,
        "differences": [
            {
                "topic": d.topic,
                "article": d.article,
                "release": d.release,
                "figures": list(NOTES.get(d.topic, ())),
            }
            for d in differences(planner.family)
        ],
    }


def flow_layers(plan: FlowPlan, formulas: _Interned) -> list[dict[str, Any]]:
    """Every layer of one flow: what it is, and where its set of formulas stands."""
    layers = plan.config.plan
    mode = decoder_mode(plan.request, ced="ced" in plan.flow)
    rows = iter(decoder_rows(layers, mode))
    out = []
    for spec in layers.layers:
        step = next(rows) if spec.side == "decoder" else None
        out.append(
            {
                "id": spec.layer_id,
                "side": spec.side,
                "role": spec.role,
                "ratio": spec.compress_ratio,
                "kv_owner": spec.kv_owner,
                "topk_owner": spec.topk_owner,
                "kv_input": spec.kv_input,
                "candidate": spec.candidate,
                "kv_adapter": spec.kv_adapter,
                "has_engram": spec.has_engram,
                "formulas": formulas.position(layer_formulas(layers, spec, step)),
            }
        )
    return out


def layer_formulas(plan: LayerPlan, spec: LayerSpec, step: LayerRows | None) -> dict[str, str]:
    """Formulas over ledger lines of what one layer runs in each phase, stores and reads.

    Args:
        step: rows of the prefill if the layer is in the decoder, None in the encoder.

    Returns:
        encode, project, replay, replay_queries, decode: rows the layer runs in each phase.
        kv_bytes_per_token, prompt_kv_bytes, kv_bytes, window_bytes: what it stores; KV after the
        prompt and after the last token.
        read_window, read_selected, scored: window rows and compressed rows the last decode step
        reads in this layer, and index keys it scores.
    """
    owns = spec.role == "full"
    ratio = spec.compress_ratio

    def kv_bytes(tokens: str) -> str:
        return f"rows.global_bytes * ({tokens} // {ratio})" if owns else "0"

    last = ("total_tokens", "total_tokens - 1")
    return {
        "encode": "phases.encode.tokens" if step is None else "0",
        "project": "phases.project.tokens" if spec in plan.boundary_owners else "0",
        "replay": "0" if step is None else step.write,
        "replay_queries": "0" if step is None else step.query,
        "decode": "phases.decode.tokens",
        "kv_bytes_per_token": f"rows.global_bytes / {ratio}" if owns else "0",
        "prompt_kv_bytes": kv_bytes("input_tokens"),
        "kv_bytes": kv_bytes("total_tokens"),
        "window_bytes": "model.window * rows.window_bytes",
        "read_window": "min(total_tokens, model.window)",
        "read_selected": selected_rows(spec, *last),
        "scored": scored_rows(spec, *last),
    }
