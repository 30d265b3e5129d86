"""`cedar plan MODEL`: the ledger of a model, a request, its flows and a machine. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from cedar.cli.options import TOKENS, Parsed, request_sizes
from cedar.errors import UsageError
from cedar.planner.export import make_report, to_json
from cedar.planner.flows import Planner, Site
from cedar.planner.hardware import Machine, find_machine
from cedar.planner.render import to_markdown, to_text
from cedar.planner.request import DECODER_PREFILL, ENCODER_REPLAY, FLOWS, Request
from cedar.planner.source import resolve_model
from cedar.planner.weights import Place, WeightClass
from cedar.units import parse_bytes, parse_fraction, parse_rate


def _milliseconds(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{what} {text!r} is not a number of milliseconds") from None
    if not 0 <= value < 1e9:
        raise UsageError(f"{what} {text!r} must be between 0 and 1e9 milliseconds")
    return value


_BYTES = Parsed("bytes", lambda text, what: parse_bytes(text, what))
_BYTE_RATE = Parsed("bytes/s", lambda text, what: parse_rate(text, "B", what))
_FLOP_RATE = Parsed("flop/s", lambda text, what: parse_rate(text, "FLOP", what))
_FRACTION = Parsed("share", parse_fraction)
_MILLISECONDS = Parsed("ms", _milliseconds)

_REQUEST_OPTIONS = (
    click.option("--input-tokens", type=TOKENS, show_default="30000, or what fits",
                 help="Prompt tokens: 30000, 30k or 128K (1024s)."),
    click.option("--output-tokens", type=TOKENS, show_default="1000, or what fits",
                 help="Generated tokens."),
    click.option("--concurrency", "--max-num-seqs", type=TOKENS, default=1, show_default=True,
                 help="Sequences of this size at once."),
    click.option("--hit-rate", type=_FRACTION, default=0.0, show_default=True,
                 help="Share of the prompt assumed in the prefix cache: 0.9 or 90%."),
    click.option("--block-size", type=TOKENS, default=128, show_default=True,
                 help="Tokens in a KV block."),
    click.option("--max-num-batched-tokens", type=TOKENS, default=2048, show_default=True,
                 help="Prefill chunk."),
    click.option("--tokens-per-turn", type=TOKENS, default=760, show_default=True,
                 help="Tokens between the boundaries at which a baseline would persist windows."),
    click.option("--decoder-prefill", type=click.Choice(DECODER_PREFILL), default="report",
                 show_default=True, help="Decoder rows that prefill runs in flows with CED."),
    click.option("--replay-windows", type=TOKENS, default=1, show_default=True,
                 help="Windows that report and cut run through the decoder."),
    click.option("--encoder-replay", type=click.Choice(ENCODER_REPLAY), default="bounded",
                 show_default=True, help="How windows are rebuilt after a prefix hit."),
    click.option("--encoder-replay-windows", type=TOKENS, default=1, show_default=True,
                 help="Windows of the prefix that bounded replay runs again."),
)  # fmt: skip

_MACHINE_OPTIONS = (
    click.option("--machine", "machine_name", metavar="NAME", default=None,
                 help="A named machine (dgx-h200), a count of one (8xh200), this or none. Default: "
                      "this, unless memory, bandwidth and flops are given."),
    click.option("--memory", type=_BYTES, help="Memory of one device: 80GB, 24GiB."),
    click.option("--bandwidth", type=_BYTE_RATE, help="Its bandwidth: 4.8TB/s."),
    click.option("--flops", type=_FLOP_RATE, help="Its dense bf16 rate: 990TFLOP/s."),
    click.option("--host-memory", type=_BYTES, help="RAM beside the accelerator."),
    click.option("--host-bandwidth", type=_BYTE_RATE, help="How fast the accelerator reads it."),
    click.option("--disk", type=_BYTES, help="SSD that weights may be mapped from."),
    click.option("--disk-bandwidth", type=_BYTE_RATE, help="How fast it reads."),
    click.option("--experts", type=click.Choice(["gpu", "ram", "ssd"]),
                 help="Where routed experts must live; default the fastest tier with room."),
    click.option("--engram", type=click.Choice(["gpu", "ram", "ssd"]),
                 help="Where n-gram tables must live; default the fastest tier with room."),
    click.option("--pinned", is_flag=True,
                 help="n-gram tables in RAM are page-locked: buffers round to powers of two."),
    click.option("--expert-alignment", type=TOKENS, default=32, show_default=True,
                 help="Columns a tensor-parallel rank pads an expert's width to."),
    click.option("--replay-overhead-ms", type=_MILLISECONDS, default=0.0, show_default=True,
                 help="Fixed cost of CED's replay that a roofline does not know."),
    click.option("--require-fit", is_flag=True, help="Exit with 3 when it does not fit."),
)  # fmt: skip


def _options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


@click.command()
@click.argument("model")
@click.option("--flow", type=click.Choice([*FLOWS, "all"]), default="all", show_default=True)
@_options(_REQUEST_OPTIONS, _MACHINE_OPTIONS)
@click.option("--explain", is_flag=True, help="Print every formula with its inputs and source.")
@click.option("--format", "form", type=click.Choice(["text", "markdown", "json"]), default="text",
              show_default=True)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
def plan(model: str, flow: str, explain: bool, form: str, as_json: bool, **options: Any) -> None:
    """Say what MODEL needs and does on a request: work, bytes, what fits, and why.

    MODEL is preset:NAME, nano, a model directory, a config.json, or a directory with a config.json
    and safetensors headers. Nothing is downloaded and no weight is read.
    """
    site = _site(options)
    if options["require_fit"] and site is None:
        raise UsageError("--require-fit needs a machine; --machine none has none")
    planner = Planner(resolve_model(model))
    sizes = options["input_tokens"], options["output_tokens"]
    options["input_tokens"], options["output_tokens"] = request_sizes(planner.config, *sizes)
    request = Request(
        **{name: options[name] for name in Request.__dataclass_fields__ if name in options}
    )
    report = make_report(
        planner,
        request,
        None if flow == "all" else flow,  # type: ignore[arg-type]  # click has checked the choice
        site,
        overhead_seconds=options["replay_overhead_ms"] / 1000,
    )
    if as_json or form == "json":
        text = json.dumps(to_json(report, explain=explain), indent=2) + "\n"
    else:
        text = (to_markdown if form == "markdown" else to_text)(report, explain=explain)
    click.echo(text, nl=False)
    refusal = report.main.refusal()
    if options["require_fit"] and refusal is not None:
        raise refusal


def _site(options: dict[str, Any]) -> Site | None:
    machine = _machine(options)
    if machine is None:
        return None
    wanted: dict[WeightClass, Place] = {}
    if options["experts"]:
        wanted["routed_experts"] = options["experts"]
    if options["engram"]:
        wanted["engram_tables"] = options["engram"]
    return Site(machine, wanted, options["pinned"], options["expert_alignment"])


def _machine(options: dict[str, Any]) -> Machine | None:
    """The named machine, the one given by hand, or a named one with fields given by hand."""
    fields = {"memory": "memory_bytes", "bandwidth": "bandwidth", "flops": "flops",
              "host_memory": "host_memory_bytes", "host_bandwidth": "host_bandwidth",
              "disk": "disk_bytes", "disk_bandwidth": "disk_bandwidth"}  # fmt: skip
    given = {field: options[name] for name, field in fields.items() if options[name] is not None}
    name = options["machine_name"]
    if name == "none":
        if given:
            raise UsageError(
                "--machine none has no memory, bandwidth or flops; leave one of them out"
            )
        return None
    whole = {"memory_bytes", "bandwidth", "flops"}
    if name is None and whole <= given.keys():
        return Machine(
            name="given", title="a machine given by hand", kind="given", source="the command line",
            accelerator="host_memory_bytes" in given, **given,
        )  # fmt: skip
    if name is None and whole & given.keys():
        raise UsageError(
            "--memory, --bandwidth and --flops describe a machine together: give all three, or "
            "name the machine they change with --machine"
        )
    machine = find_machine(name or "this")
    if not given:
        return machine
    changed = ", ".join(sorted(given))
    return replace(
        machine, kind="given", source=f"{machine.source}; given by hand: {changed}", **given
    )
