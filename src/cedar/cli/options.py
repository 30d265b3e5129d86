"""Options that several verbs share, with one wording."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cedar.config import ModelConfig
from cedar.errors import UsageError
from cedar.planner.request import INPUT_TOKENS, OUTPUT_TOKENS, default_sizes
from cedar.units import parse_tokens

F = TypeVar("F", bound=Callable[..., Any])


class Parsed(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """A value read by one of the parsers of `cedar.units`."""

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a string; a default that is already a number passes."""
        if not isinstance(value, str):
            return value
        return self._parse(value, param.opts[0] if param is not None and param.opts else self.name)


TOKENS = Parsed("tokens", parse_tokens)


def request_sizes(
    config: ModelConfig, input_tokens: int | None, output_tokens: int | None
) -> tuple[int, int]:
    """Input and output tokens; says on stderr when a default had to shrink to fit."""
    sizes = default_sizes(config, input_tokens, output_tokens)
    if sizes != (input_tokens or INPUT_TOKENS, output_tokens or OUTPUT_TOKENS):
        click.echo(
            f"note: {sizes[0]:,} input + {sizes[1]:,} output tokens, because this model's context "
            f"has {config.max_position_embeddings:,}; choose with --input-tokens and --output-tokens",
            err=True,
        )
    return sizes


def model_options(command: F) -> F:
    """MODEL and how to load it."""
    for decorate in (
        click.option("--seed", type=int, default=0, show_default=True,
                     help="Seed of preset weights and of sampling."),
        click.option(
            "--index-key-rule", type=click.Choice(["corrected", "as_shipped"]),
            default="corrected", show_default=True,
            help="Keys an index source scores: its owner's, or what the released program published last.",
        ),
        click.option(
            "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16",
            show_default=True, help="Arithmetic of activations.",
        ),
        click.option(
            "--kernels", type=click.Choice(["auto", "reference", "native"]), default="auto",
            show_default=True, help="Operators to use.",
        ),
        click.argument("model"),
    ):  # fmt: skip
        command = decorate(command)
    return command


def read_text(path: Path) -> str:
    """A UTF-8 text file, or standard input for `-`.

    Raises:
        UsageError: it cannot be read or is not UTF-8.
    """
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as UTF-8 text: {error}") from None
