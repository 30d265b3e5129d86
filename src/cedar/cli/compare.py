"""`cedar compare MODEL`: run the four flows on one request; measured beside predicted and quoted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cedar.cli.options import TOKENS, model_options, read_text
from cedar.errors import UsageError
from cedar.page.page import check_writable, write_page
from cedar.planner.export import make_report, to_json
from cedar.planner.flows import Planner
from cedar.planner.request import Flow, Request
from cedar.planner.source import resolve_model
from cedar.units import format_bytes, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from cedar.bench.flows import FlowRun


@click.command()
@model_options
@click.option("--input-tokens", type=TOKENS, help="Random prompt of this length: 30000 or 30k.")
@click.option("--output-tokens", type=TOKENS, default=64, show_default=True)
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    help="Prompt text (trained models); - reads stdin.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--html", type=click.Path(path_type=Path), help="Also write the figures page with it."
)
def compare(
    model: str, kernels: str, dtype: str, index_key_rule: str, seed: int,
    input_tokens: int | None, output_tokens: int, prompt_file: Path | None, as_json: bool,
    html: Path | None,
) -> None:  # fmt: skip
    """Run none, ced, csa2 and ced+csa2 on one request and compare what they ran and stored."""
    if (input_tokens is None) == (prompt_file is None):
        raise UsageError("give exactly one of --input-tokens (random prompt) and --prompt-file")
    planned = resolve_model(model)
    if input_tokens is not None:
        Request(input_tokens=input_tokens, output_tokens=output_tokens).check(planned.config)
    if html is not None:
        check_writable(html)
    import torch

    from cedar.bench.flows import random_flow_models, run_flow, trained_flow_models
    from cedar.bench.record import environment
    from cedar.kernels.backends import select_operators
    from cedar.loading import from_config, load, reload_as
    from cedar.model_directory import PRESET_PREFIX, find_tokenizer

    ops = select_operators(kernels)
    tokenizer = find_tokenizer(model)
    if model.startswith(PRESET_PREFIX):
        build = partial(from_config, ops=ops, dtype=getattr(torch, dtype),
                        index_key_rule=index_key_rule, seed=seed)  # type: ignore[arg-type]  # fmt: skip
        models, reasons = random_flow_models(planned.config, build)
    else:
        loaded = load(model, kernels=kernels, dtype=dtype, index_key_rule=index_key_rule)  # type: ignore[arg-type]
        models, reasons = trained_flow_models(loaded, lambda config: reload_as(loaded, config))
    prompt = _prompt(input_tokens, prompt_file, tokenizer, planned.config.vocab_size, seed)
    request = Request(input_tokens=len(prompt), output_tokens=output_tokens)
    runs = {}
    for flow, make in models.items():
        click.echo(f"{flow}: building, kernels={ops.name}", err=True)
        runs[flow] = run_flow(
            flow, make(), prompt, output_tokens, lambda line: click.echo(line, err=True)
        )
    report = make_report(Planner(planned), request)
    record = to_json(report)
    for flow, run in runs.items():
        record["flows"][flow]["measured"] = run.to_dict()
        if tokenizer is not None:
            record["flows"][flow]["measured"]["text"] = tokenizer.decode(run.output_ids)
    for flow, reason in reasons.items():
        record["flows"].setdefault(flow, {})["not_measured"] = reason
    record |= {"schema": "cedar.compare", "machine_measured": environment(), "kernels": ops.name,
               "dtype": dtype, "index_key_rule": index_key_rule, "seed": seed}  # fmt: skip
    click.echo(json.dumps(record, ensure_ascii=False) if as_json else _table(record, runs))
    if html is not None:
        write_page(html, compare=record)


def _prompt(
    tokens: int | None, file: Path | None, tokenizer: Any, vocab_size: int, seed: int
) -> list[int]:
    if file is not None:
        if tokenizer is None:
            raise UsageError(
                f"--prompt-file {file} needs a model with a tokenizer, which this one has not; use "
                "--input-tokens"
            )
        return list(tokenizer.encode(read_text(file), add_special_tokens=True))
    import random

    draw = random.Random(seed)
    assert tokens is not None
    return [draw.randrange(3, vocab_size) for _ in range(tokens)]


def _prefill_ratio(runs: dict[Any, FlowRun], flow: Flow, base: Flow) -> list[str]:
    """The line that compares two flows' prefill; none unless both ran."""
    if flow not in runs or base not in runs:
        return []
    name, ran = f"prefill time {flow} / {base}", runs[flow].prefill_token_layers
    if ran == runs[base].prefill_token_layers:
        return [f"{name}: no ratio, both ran the same {ran:,} token-layers"]
    return [f"{name}: {runs[flow].prefill_seconds / runs[base].prefill_seconds:.3f}"]


def _table(record: dict[str, Any], runs: dict[Any, FlowRun]) -> str:
    """Rows of measured values, each with the ledger's prediction and the article's figure."""
    flows = list(record["flows"])
    width = 17
    request = record["request"]
    lines = [
        f"{record['model']['name']}: {request['input_tokens']:,} input + "
        f"{request['output_tokens']:,} output tokens, kernels {record['kernels']}",
        "",
        " " * 34 + "".join(f"{flow:>{width}}" for flow in flows),
    ]

    def row(label: str, value: Any) -> None:
        cells = []
        for flow in flows:
            try:
                cells.append(value(record["flows"][flow]))
            except KeyError:
                cells.append("-")
        lines.append(f"{label:<34}" + "".join(f"{cell:>{width}}" for cell in cells))

    def measured(key: str, show: Any) -> Any:
        return lambda flow: show(flow["measured"][key])

    def count(value: float) -> str:
        return f"{int(value):,}"

    row("tokens x layers, prefill", measured("prefill_token_layers", count))
    row("  of these in the decoder", measured("decoder_token_layers", count))
    row("tokens x layers, decode", measured("decode_token_layers", count))
    row("FLOPs, prefill", lambda flow: format_flops(flow["flops"]["prefill"]["total"]))
    row("FLOPs, a decode token", lambda flow: format_flops(flow["flops"]["decode_token"]))
    row("prefill time", measured("prefill_seconds", format_seconds))
    row("decode time", measured("decode_seconds", format_seconds))
    row("KV bytes, measured", measured("kv_bytes", count))
    row("KV bytes, ledger", lambda flow: count(flow["kv_bytes"]))
    row("KV, the article prints", lambda flow: format_bytes(flow["quoted"]["kv_bytes"]))
    row("window bytes, measured", measured("window_bytes", count))
    row("window bytes, ledger", lambda flow: count(flow["window_bytes"]))
    row("persisted rows, measured", measured("persisted_bytes", count))
    row("persisted rows, ledger", lambda flow: count(flow["store"]["complete_block_bytes"]))
    row("  files of the prefix store", measured("persisted_file_bytes", count))
    row("activated parameters, prefill", lambda flow: format_count(flow["activated_prefill"]))
    row("activated parameters, decode", lambda flow: format_count(flow["activated_decode"]))
    row("peak memory above start", measured("peak_bytes", format_bytes))
    lines += [
        "",
        "labels: token-layers, times, peak memory, files and rows named measured are measured; FLOPs, "
        "activated parameters and ledger rows are derived; what the article prints is quoted",
    ]
    lines += ["", *_prefill_ratio(runs, "ced", "none"), *_prefill_ratio(runs, "ced+csa2", "csa2")]
    for flow in flows:
        if "not_measured" in record["flows"][flow]:
            lines.append(f"{flow}: not run, {record['flows'][flow]['not_measured']}")
    for flow in flows:
        text = record["flows"][flow].get("measured", {}).get("text")
        if text is not None:
            lines += ["", f"{flow} wrote: {text}"]
    return "\n".join(lines)
