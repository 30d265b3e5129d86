"""Options that several verbs share, with one wording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cedar.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def model_options(command: F) -> F:
    """MODEL and how to load it."""
    for decorate in (
        click.option("--seed", type=int, default=0, help="Seed of preset weights and of sampling."),
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
    """A UTF-8 text file.

    Raises:
        UsageError: it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as UTF-8 text: {error}") from None
