"""Reading the JSON record of a `cedar compare` run: what is needed of it, and clear refusals.

The page shows a record's measured numbers beside the ledger's. It reads `request`, `model` and, in
each flow, `measured`; other keys pass untouched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cedar.errors import UsageError
from cedar.planner.request import FLOWS

_REMEDY = "make one with: cedar compare MODEL --json > record.json"


def read_record(path: Path) -> dict[str, Any]:
    """A checked record.

    Raises:
        UsageError: the file cannot be read, is no JSON, or is no record of a compare run.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the record {path}: {error.strerror}; {_REMEDY}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not JSON ({error}); {_REMEDY}") from None
    problem = record_problem(record)
    if problem is not None:
        raise UsageError(f"{path} is not a record of a compare run: {problem}; {_REMEDY}")
    return dict(record)


def record_problem(record: Any) -> str | None:
    """Why a JSON value is no record; None if it is one."""
    if not isinstance(record, dict):
        return f"it holds a {type(record).__name__}, not an object"
    if not isinstance(model_name(record), str):
        return "it has no model name"
    request = record.get("request")
    for name in ("input_tokens", "output_tokens"):
        value = request.get(name) if isinstance(request, dict) else None
        if type(value) is not int or value < 1:
            return f"request.{name} is {value!r}, not a whole number of tokens"
    flows = record.get("flows")
    if not isinstance(flows, dict) or not flows:
        return "it has no flows"
    unknown = sorted(flows.keys() - set(FLOWS))
    if unknown:
        return f"it names the flows {', '.join(unknown)}; known are {', '.join(FLOWS)}"
    return _flows_problem(flows)


def _flows_problem(flows: dict[str, Any]) -> str | None:
    seen = False
    for name, flow in flows.items():
        measured = flow.get("measured") if isinstance(flow, dict) else None
        if measured is None:
            continue
        if not isinstance(measured, dict):
            return f"flows.{name}.measured is {measured!r}, not an object"
        for key, value in measured.items():
            if key in NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
                return f"flows.{name}.measured.{key} is {value!r}, not a number"
        seen = True
    return None if seen else "no flow has measured numbers (a plan, not a run?)"


#: Measured numbers that the page shows.
NUMBERS = ("kv_bytes", "window_bytes", "persisted_bytes", "encode_token_layers",
           "decoder_token_layers", "prefill_seconds", "decode_seconds")  # fmt: skip


def model_name(record: dict[str, Any]) -> Any:
    """Name of the model that ran: `model.name`, or `model` itself."""
    model = record.get("model")
    return model.get("name") if isinstance(model, dict) else model
