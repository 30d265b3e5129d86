"""`cedar bench kernels | offline | scaling | serving | prefix`: ratios taken in one run.

Each prints a table, or one JSON document.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import click

from cedar.errors import UsageError
from cedar.units import format_bytes, format_flops, format_seconds


@click.group()
def bench() -> None:
    """Measure this machine: A and B interleaved in one run, medians and spread of their ratio."""


def _say(line: str) -> None:
    click.echo(line, err=True)


def _backends() -> tuple[Any, Any]:
    from cedar.kernels.backends import select_operators

    native = select_operators("native")
    return native, select_operators("reference")


def _emit(document: dict[str, Any], table: list[str], as_json: bool) -> None:
    click.echo(json.dumps(document) if as_json else "\n".join(table))


#: oneDNN's names for what the native variants use.
_ONEDNN_ISA = {"avx2": "AVX2", "avx512": "AVX512_CORE_BF16", "amx": "AVX512_CORE_AMX"}

_ROUNDS = click.option("--rounds", type=click.IntRange(min=5), default=7, show_default=True)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@bench.command()
@click.option("--isa", type=click.Choice(["avx2", "avx512", "amx"]),
              help="Hold the kernels and torch to these instructions; default: the best here.")  # fmt: skip
@_ROUNDS
@_JSON
def kernels(isa: str | None, rounds: int, as_json: bool) -> None:
    """Native operators against reference operators and against the machine's ceilings."""
    if isa is not None:  # read by torch's oneDNN at its first product, so set before torch comes in
        os.environ["ONEDNN_MAX_CPU_ISA"] = _ONEDNN_ISA[isa]
    from cedar.bench.kernels import run_cases
    from cedar.bench.record import environment
    from cedar.kernels.backends import native_operators, select_operators

    native, reference = native_operators(isa), select_operators("reference")
    table = [
        f"{'operator':<26}{'shape':<42}{native.name:>16}{'reference':>12}{'ratio':>8}"
        f"{'quartiles':>16}{'of ceiling':>12}  ceiling",
    ]
    _say(table[0])
    results = []
    for result in run_cases(native, reference, rounds=rounds):
        ratio, ceilings = result.ratio, result.ceilings
        share, ceiling = "-", ""
        if result.fraction is not None:
            share = f"{result.fraction:.0%}"
            flops, read = format_flops(ceilings.bf16_flops), format_bytes(ceilings.read_bytes)
            ceiling = f"bf16 GEMM {flops}/s" if result.case.flops else f"memory read {read}/s"
        line = (
            f"{result.case.name:<26}{result.case.shape:<42}{format_seconds(ratio.a_seconds):>16}"
            f"{format_seconds(ratio.b_seconds):>12}{ratio.speedup:>7.1f}x"
            f"{f'{ratio.low:.1f}..{ratio.high:.1f}':>16}{share:>12}  {ceiling}"
        )
        _say(line)
        table.append(line)
        results.append(result.to_dict())
    _emit(
        {"environment": environment(), "kernels": native.name, "results": results}, table, as_json
    )


@bench.command()
@click.option("--preset", "preset_name", default="article-thin", show_default=True)
@_ROUNDS
@_JSON
def offline(preset_name: str, rounds: int, as_json: bool) -> None:
    """Prefill, decode, CED and batching of a whole model, as ratios."""
    from cedar.bench.offline import run_offline, step_breakdown
    from cedar.bench.record import environment

    native, reference = _backends()
    header = f"{'what':<40}{'A':<12}{'B':<14}{'A':>10}{'B':>10}{'B / A':>8}{'quartiles':>16}"
    table = [f"{preset_name}, kernels {native.name}", header]
    _say("\n".join(table))
    results = []
    for result in run_offline(native, reference, preset_name=preset_name, rounds=rounds):
        ratio = result.ratio
        line = (
            f"{result.name:<40}{result.a:<12}{result.b:<14}{format_seconds(ratio.a_seconds):>10}"
            f"{format_seconds(ratio.b_seconds):>10}{ratio.speedup:>7.2f}x"
            f"{f'{ratio.low:.2f}..{ratio.high:.2f}':>16}  {result.note}"
        )
        _say(line)
        table.append(line)
        results.append(result.to_dict())
    step = step_breakdown(native, preset_name)
    table.append(f"a decode step of {step.milliseconds:.2f} ms goes to:")
    table += [f"  {name:<28}{ms:8.3f} ms" for name, ms in step.operators.items()]
    document = {
        "environment": environment(), "preset": preset_name, "kernels": native.name,
        "results": results, "step_milliseconds": step.operators,
    }  # fmt: skip
    _emit(document, table, as_json)


@bench.command()
@click.option("--preset", "preset_name", default="nano", show_default=True)
@click.option("--contexts", default="4096,65536,262144", show_default=True)
@click.option("--long", "long_length", type=int, default=0, help="Also one prefill of this length.")
@_JSON
def scaling(preset_name: str, contexts: str, long_length: int, as_json: bool) -> None:
    """Decode steps and prefill memory at growing contexts (random weights of a preset)."""
    try:
        lengths = sorted({int(part) for part in contexts.split(",")})
    except ValueError:
        raise UsageError(f"--contexts {contexts!r} must be integers separated by commas") from None
    if not lengths or lengths[0] < 1 or long_length < 0:
        raise UsageError(
            f"--contexts {contexts!r} and --long {long_length} must be token counts: at least 1, and 0 "
            f"for no --long"
        )
    from cedar.bench.record import environment
    from cedar.bench.scaling import decode_scaling, long_prefill, prefill_scratch
    from cedar.config.presets import preset
    from cedar.loading import from_config

    native, _ = _backends()
    model = from_config(preset(preset_name), ops=native)
    document: dict[str, Any] = {"environment": environment(), "preset": preset_name}
    document["scratch"] = prefill_scratch(model, (4096, 32768), _say)
    document["decode"] = decode_scaling(model, lengths, _say)
    table = ["prefill scratch beyond the state"]
    table += [
        f"  {row['length']:>10,} tokens  {format_bytes(row['peak_scratch_bytes']):>12}"
        for row in document["scratch"]
    ]
    table.append("decode step at a context")
    table += [
        f"  {row['context']:>10,} tokens  {format_seconds(row['step_seconds']):>10}  "
        f"{row['over_first']:.2f}x of the first; prefill {row['prefill_tokens_per_second']:,.0f} tokens/s"
        for row in document["decode"]
    ]
    if long_length:
        document["long"] = row = long_prefill(model, long_length, _say)
        table.append(
            f"prefill of {row['length']:,} tokens: {format_seconds(row['prefill_seconds'])}, "
            f"{row['tokens_per_second']:,.0f} tokens/s, KV {format_bytes(row['kv_bytes'])}, peak "
            f"{format_bytes(row['peak_bytes'])}, step {format_seconds(row['step_seconds'])}"
        )
    _emit(document, table, as_json)


@bench.command()
@click.option("--model", default="nano", show_default=True, help="A model with a tokenizer.")
@click.option("--streams", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@_ROUNDS
@_JSON
def serving(
    model: str, streams: int, prompt_tokens: int, output_tokens: int, rounds: int, as_json: bool
) -> None:
    """The server on loopback against the offline engine, and the latencies its clients see."""
    from cedar.bench.record import environment
    from cedar.bench.serving import run_serving
    from cedar.model_directory import find_tokenizer

    if find_tokenizer(model) is None:
        raise UsageError(
            f"--model {model} has no tokenizer, which a server needs; name a model directory that has "
            f"one, or nano"
        )
    result = run_serving(
        model, streams=streams, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        rounds=rounds,
    )  # fmt: skip
    document = result.to_dict()
    low, high = document["overhead_quartiles"]
    table = [
        f"{model}, {streams} streams of {prompt_tokens} + {output_tokens} tokens",
        f"server {format_seconds(document['server_seconds'])}, offline "
        f"{format_seconds(document['offline_seconds'])}: overhead {result.overhead:.1%} "
        f"(quartiles {low:.1%}..{high:.1%} of {rounds} rounds), in processor seconds "
        f"{document['cpu_overhead']:.1%}",
    ]
    for name, key in (("first token", "ttft_seconds"), ("between tokens", "inter_token_seconds")):
        times = document[key]
        table.append(
            f"  {name:<16} p50 {format_seconds(times['p50']):>10}  p99 "
            f"{format_seconds(times['p99']):>10}"
        )
    _emit({"environment": environment(), "model": model, **document}, table, as_json)


@bench.command()
@click.option("--preset", "preset_name", default="article-thin", show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=30_000, show_default=True,
              help="Prompt that is read cold, from disk and from memory.")  # fmt: skip
@click.option("--turns", type=click.IntRange(min=0), default=20, show_default=True,
              help="Turns of the conversation whose bytes are measured; 0 leaves it out.")  # fmt: skip
@click.option("--turn-tokens", type=click.IntRange(min=2), default=1500, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(min=1), default=150, show_default=True,
              help="Those of a turn that are generated.")  # fmt: skip
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="A place on the disk to measure; default: the one for temporary files.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=5), default=5, show_default=True)
@_JSON
def prefix(
    preset_name: str, tokens: int, turns: int, turn_tokens: int, answer_tokens: int,
    directory: Path | None, rounds: int, as_json: bool,
) -> None:  # fmt: skip
    """A prompt that was read before: cold, from disk, from memory; and bytes on disk."""
    from cedar.bench.prefix import conversation_bytes, run_prefix
    from cedar.bench.record import environment
    from cedar.config.presets import preset
    from cedar.loading import from_config

    if answer_tokens >= turn_tokens:
        raise UsageError(
            f"--answer-tokens {answer_tokens} leaves nothing of --turn-tokens {turn_tokens} to read; "
            f"lower it to {turn_tokens - 1} or less"
        )
    native, _ = _backends()
    config = preset(preset_name)
    document: dict[str, Any] = {"environment": environment(), "preset": preset_name}
    # As Ctrl-C: whoever ends the run finds the directory removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="cedar-bench-", dir=directory) as place:
        times = run_prefix(
            from_config(config, ops=native), Path(place) / "prompt", tokens=tokens, rounds=rounds,
            progress=_say,
        )  # fmt: skip
        document["times"] = times.to_dict()
        table = [
            f"{preset_name}, a prompt of {tokens:,} tokens: {times.cached_tokens:,} cached, "
            f"{times.replayed_tokens:,} of them replayed",
            f"  cold prefill      {format_seconds(times.disk.b_seconds):>10}",
        ]
        for name, ratio in (("from disk", times.disk), ("from memory", times.memory)):
            table.append(
                f"  {name:<16}  {format_seconds(ratio.a_seconds):>10}  1/{ratio.speedup:.1f} of cold "
                f"(quartiles 1/{ratio.low:.1f}..1/{ratio.high:.1f}, {rounds} rounds)"
            )
        table.append(f"  {format_bytes(times.read_bytes)} read from disk")
        if turns:
            stored = conversation_bytes(
                config, native, Path(place), turns=turns, turn_tokens=turn_tokens,
                answer_tokens=answer_tokens, progress=_say,
            )  # fmt: skip
            document["conversation"] = stored.to_dict()
            table += [
                f"{turns} turns of {turn_tokens:,} tokens on disk",
                f"  shared rows                    {format_bytes(stored.rows):>12}",
                f"  shared rows and windows        {format_bytes(stored.with_windows):>12}  "
                f"{stored.rows / stored.with_windows:.3f}",
                f"  rows of every layer, windows   {format_bytes(stored.baseline):>12}  "
                f"{stored.rows / stored.baseline:.4f}, 1/{stored.baseline / stored.rows:.2f}",
            ]
    _emit(document, table, as_json)
