"""Entry point: dispatches verbs, imports each only when it runs, maps errors to exit codes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module

import click

from cedar import __version__
from cedar.errors import CedarError

#: verb -> module that defines a click command of the same name, in the order of the help page.
_VERBS = {
    "generate": "cedar.cli.generate",
    "serve": "cedar.cli.serve",
    "inspect": "cedar.cli.inspect_model",
    "compare": "cedar.cli.compare",
    "plan": "cedar.cli.plan",
    "page": "cedar.cli.page",
    "bench": "cedar.cli.bench",
    "train": "cedar.cli.train",
    "cache": "cedar.cli.cache",
}


class _LazyGroup(click.Group):
    """Imports a verb's module on use, so that `cedar plan` never pays for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = getattr(import_module(_VERBS[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cedar")
def cedar() -> None:
    """Run, inspect, plan and train DeepSeek-V4.1-Flash models on a CPU.

    MODEL is a directory in Hugging Face layout, `nano` (ships with cedar) or preset:NAME (random
    weights).
    """


def main() -> None:
    """Run the command line; never shows a traceback for an error a user can cause."""
    try:
        status = cedar.main(standalone_mode=False)
        sys.stdout.flush()
    except CedarError as error:
        click.echo(f"cedar: error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except UnicodeEncodeError as error:
        click.echo(
            f"cedar: error: output in {error.encoding} cannot carry {error.object[error.start]!a}; set "
            f"PYTHONIOENCODING=utf-8",
            err=True,
        )
        _drop_output()
        sys.exit(CedarError.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        click.echo(
            f"cedar: error: {error}; check the file, the space left and where the output goes",
            err=True,
        )
        _drop_output()
        sys.exit(CedarError.exit_code)
    sys.exit(status if isinstance(status, int) else 0)


def _drop_output() -> None:
    """Let the interpreter end quietly: what stdout could not take would fail again at its exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
