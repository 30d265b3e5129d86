"""`cedar train RECIPE`: train a model and export it; progress on stderr, stoppable, resumable."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import click

from cedar.errors import UsageError


@click.command()
@click.argument("recipe")
@click.option("--data", type=click.Path(path_type=Path), required=True,
              help="Directory with train.bin, heldout.bin and tokenizer.json.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True,
              help="Directory of the training checkpoint.")  # fmt: skip
@click.option("--minutes", type=float, help="Train this long; all phases are scaled to it.")
@click.option("--tokens", type=int, help="Train on this many tokens; reproducible.")
@click.option("--export", "export_to", type=click.Path(path_type=Path),
              help="Write the finished model here, in the released format.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in --out.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, default=os.cpu_count() or 1, show_default=True)
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True,
              help="Compile the step with the C++ compiler, where there is one.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def train(
    recipe: str, data: Path, out: Path, minutes: float | None, tokens: int | None,
    export_to: Path | None, resume: bool, seed: int, threads: int, compiled: bool, as_json: bool,
) -> None:  # fmt: skip
    """Train a model by a recipe (nano, tiny) until the budget is used up.

    Ctrl-C or SIGTERM writes a checkpoint and exits with 130; go on with --resume.
    """
    if (minutes is None) == (tokens is None):
        raise UsageError("pass exactly one of --minutes and --tokens: the budget of the run")
    if (tokens is not None and tokens < 1) or (minutes is not None and minutes <= 0):
        raise UsageError(
            f"the budget must be positive, got {tokens if minutes is None else minutes}"
        )
    from cedar.training.session import Session, SessionOptions, use_threads
    from cedar.training.trainer import Budget

    use_threads(threads)
    options = SessionOptions(
        recipe, data, out, Budget(tokens=tokens, minutes=minutes), seed, compiled, resume
    )
    session = Session(options)
    _say(f"recipe {recipe}: {session.trainer.parameters:,} parameters, checkpoint in {out}")
    finished = session.run(_say, _stop_on_signals())
    trainer = session.trainer
    if not finished:
        _say(f"stopped at {trainer.tokens:,} tokens; go on with --resume")
        sys.exit(130)
    nats = session.held_out_loss(1.0)
    if export_to is not None:
        session.export(export_to)
        _say(f"exported to {export_to}")
    bits = session.held_out.bits_per_byte(nats)
    _say(f"held-out {nats:.4f} nats/token, {bits:.4f} bits/byte after {trainer.tokens:,} tokens")
    if as_json:
        record = {
            "recipe": recipe,
            "tokens": trainer.tokens,
            "steps": trainer.step,
            "seconds": trainer.seconds,
            "held_out_nats_per_token": nats,
            "held_out_bits_per_byte": bits,
            "exported": None if export_to is None else str(export_to),
        }
        click.echo(json.dumps(record))


def _say(line: str) -> None:
    click.echo(line, err=True)


class _Stop:
    """Set by a signal, read between updates."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self._asked = True


def _stop_on_signals() -> _Stop:
    stop = _Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.ask)
    return stop
