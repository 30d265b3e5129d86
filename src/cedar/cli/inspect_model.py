"""`cedar inspect MODEL`: layer plan, parameters, bytes per token, what would load. Reads no weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from cedar.config.flows import flow_name
from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import weight_schema
from cedar.formats.headers import check_headers, read_headers
from cedar.formats.rows import RowFormats
from cedar.planner.flows import Planner
from cedar.planner.request import Request
from cedar.planner.source import PlannedModel, resolve_model
from cedar.units import format_bytes, format_count

#: Parts that are counted apart from the backbone.
_APART = {"engram_tables": "engram", "vision": "vision", "draft": "draft"}
#: Parts that are recognised and checked, but not run by this version.
_NOT_RUN = ("vision", "draft")


@click.command("inspect")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def inspect(model: str, as_json: bool) -> None:
    """Print the layer plan, the parameters, bytes per token, and what would load."""
    planned = resolve_model(model)
    record = _record(planned)
    click.echo(json.dumps(record) if as_json else _text(planned.config, record))


def _record(planned: PlannedModel) -> dict[str, Any]:
    config, plan = planned.config, planned.config.plan
    formats = RowFormats.of(config)
    parts: Counter[str] = Counter()
    for tensor in weight_schema(config):
        parts[tensor.part] += tensor.parameters
    parameters = {"backbone": 0, "engram": 0, "vision": 0, "draft": 0}
    for part, count in parts.items():
        parameters[_APART.get(part, "backbone")] += count
    # Engram projections belong to the memory's cost but are not backbone parameters.
    parameters["backbone"] -= parts["engram"]
    planner = Planner(planned)
    ledger = planner.plan(Request(input_tokens=1, output_tokens=1), planner.default_flow).ledger
    parameters["engram_projections"] = parts["engram"]
    parameters["activated_prefill"] = int(ledger["activated_prefill"])
    parameters["activated_decode"] = int(ledger["activated_decode"])
    return {
        "model": planned.name,
        "flow": flow_name(config),
        "num_hidden_layers": len(plan),
        "num_encoder_layers": plan.num_encoder_layers,
        "sliding_window": plan.sliding_window,
        "index_topk": plan.index_topk,
        "ced_blocker": plan.ced_blocker,
        "layers": [
            {
                "layer_id": spec.layer_id,
                "side": spec.side,
                "role": spec.role,
                "compress_ratio": spec.compress_ratio,
                "kv_owner": spec.kv_owner,
                "topk_owner": spec.topk_owner,
                "kv_input": spec.kv_input,
                "candidate": spec.candidate,
                "kv_adapter": spec.kv_adapter,
                "has_engram": spec.has_engram,
            }
            for spec in plan.layers
        ],
        "row_bytes": {
            "main": formats.main.row_bytes,
            "index": formats.index.row_bytes,
            "window": formats.window.row_bytes,
        },
        "kv_bytes_per_token": formats.kv_bytes_per_token(plan),
        "window_bytes": formats.window_bytes(plan),
        "open_group_bytes": formats.open_group_bytes(plan),
        "parameters": parameters,
        "dense_dtype": config.dense_dtype,
        "expert_dtype": config.expert_dtype,
        "unknown_config_keys": list(config.unknown_keys),
        "checkpoint": _checkpoint(planned),
    }


def _checkpoint(planned: PlannedModel) -> dict[str, Any] | None:
    """What the files hold and what of it would be loaded; None without weights."""
    if planned.tensors is None:
        return None
    path = Path(planned.name)
    if not path.is_dir():
        path = Path(__file__).parent.parent / "assets" / planned.name
    headers = read_headers(path)
    schema = list(weight_schema(planned.config))
    check_headers(headers, schema)
    skipped = [tensor for tensor in schema if tensor.part in _NOT_RUN]
    return {
        "tensors": len(headers),
        "bytes": sum(header.nbytes for header in headers.values()),
        "loaded_tensors": len(schema) - len(skipped),
        "loaded_bytes": sum(t.nbytes for t in schema if t.part not in _NOT_RUN),
        "not_run": {part: sum(1 for t in skipped if t.part == part) for part in _NOT_RUN},
    }


def _text(config: ModelConfig, record: dict[str, Any]) -> str:
    parameters = record["parameters"]
    lines = [
        f"{record['model']}: {record['num_hidden_layers']} layers, encoder 0.."
        f"{record['num_encoder_layers'] - 1}, flow {record['flow']}",
        "",
        config.plan.table(),
        "",
        "parameters   "
        + ", ".join(f"{name} {format_count(n)}" for name, n in parameters.items() if n),
        f"KV           {record['kv_bytes_per_token']:g} B/token (rows: main {record['row_bytes']['main']}"
        f" + index key {record['row_bytes']['index']} B per owner / ratio)",
        f"windows      {format_bytes(record['window_bytes'])} per sequence, constant",
        f"weights      dense {record['dense_dtype']}, experts {record['expert_dtype']}",
    ]
    if record["ced_blocker"]:
        lines.append(f"CED          off: {record['ced_blocker']}")
    checkpoint = record["checkpoint"]
    if checkpoint is None:
        lines.append("checkpoint   none (sizes are those of the config)")
    else:
        skipped = ", ".join(f"{n} {part}" for part, n in checkpoint["not_run"].items() if n)
        lines.append(
            f"checkpoint   {checkpoint['tensors']} tensors, {format_bytes(checkpoint['bytes'])}; "
            f"loads {checkpoint['loaded_tensors']} ({format_bytes(checkpoint['loaded_bytes'])})"
            + (f"; recognised, not run: {skipped}" if skipped else "")
        )
    if record["unknown_config_keys"]:
        lines.append(f"unknown keys {', '.join(record['unknown_config_keys'])} (kept, no effect)")
    lines.append(
        "labels       all derived from the config; tensors and bytes of the checkpoint are measured"
    )
    return "\n".join(lines)
