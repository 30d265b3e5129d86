"""`cedar page`: write the ten figures as one HTML file. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cedar.cli.options import request_sizes
from cedar.page.figures import DEFAULT_MODELS
from cedar.page.page import first_request, page_planners, write_page
from cedar.page.record import read_record
from cedar.planner.request import FLOWS, Flow, Request
from cedar.units import format_bytes, parse_tokens

FILE_NAME = "cedar.html"


def _tokens(_ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_tokens(value, param.opts[-1])


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path(), show_default=True,
              metavar="DIR", help=f"Directory of {FILE_NAME}; made if need be.")  # fmt: skip
@click.option("--model", "models", multiple=True, metavar="MODEL", default=DEFAULT_MODELS,
              show_default=True, help="Model to choose from; repeatable, the first is shown.")  # fmt: skip
@click.option("--compare", type=click.Path(path_type=Path), metavar="FILE",
              help="Record of `cedar compare MODEL --json`, shown beside the predictions.")  # fmt: skip
@click.option("--input-tokens", callback=_tokens, metavar="TOKENS",
              help="Prompt tokens first shown.  [default: the record's, or 30000, or what fits]")  # fmt: skip
@click.option("--output-tokens", callback=_tokens, metavar="TOKENS",
              help="Answer tokens first shown.  [default: the record's, or 1000]")  # fmt: skip
@click.option("--tokens-per-turn", callback=_tokens, default="760", show_default=True,
              metavar="TOKENS",
              help="Tokens between boundaries at which a baseline keeps windows.")  # fmt: skip
@click.option("--flow", type=click.Choice(FLOWS), default="ced+csa2", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def page(
    out: Path, models: tuple[str, ...], compare: Path | None, input_tokens: int | None,
    output_tokens: int | None, tokens_per_turn: int, flow: Flow, as_json: bool,
) -> None:  # fmt: skip
    """Write cedar.html: the ten figures, computed from the ledger in the page itself.

    The file needs nothing else: it opens from disk and asks for nothing over the network.
    """
    record = None if compare is None else read_record(compare)
    if record is not None:
        first = first_request(record)
        input_tokens = first.input_tokens if input_tokens is None else input_tokens
        output_tokens = first.output_tokens if output_tokens is None else output_tokens
    config = page_planners(models, record)[0].config
    input_tokens, output_tokens = request_sizes(config, input_tokens, output_tokens)
    request = Request(
        input_tokens=input_tokens, output_tokens=output_tokens, tokens_per_turn=tokens_per_turn
    )
    path = write_page(out / FILE_NAME, compare=record, models=models, request=request, flow=flow)
    size = path.stat().st_size
    if as_json:
        names = [planner.model.name for planner in page_planners(models, record)]
        click.echo(json.dumps({"path": str(path), "bytes": size, "models": names}))
    else:
        click.echo(f"wrote {path}, {format_bytes(size)}; open it in a browser")
