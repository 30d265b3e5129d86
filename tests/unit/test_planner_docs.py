"""Commands in the documentation run, fit the machine they name, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from cedar.cli.plan import plan
from cedar.config import preset
from cedar.planner.flows import Planner, Site
from cedar.planner.hardware import find_machine, machines
from cedar.planner.render import ledger_table
from cedar.planner.request import Request

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("README.md")])


def blocks(page: Path) -> list[list[str]]:
    """Lines of each fenced block."""
    text = page.read_text(encoding="utf-8")
    return [block.splitlines() for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)]


def commands() -> list[tuple[str, str, list[str]]]:
    """(page, command, output lines that follow it) of every `cedar plan` in a fenced block."""
    found = []
    for page in PAGES:
        for lines in blocks(page):
            for i, line in enumerate(lines):
                command = line.strip().removeprefix("$ ").strip()
                if command.startswith("cedar plan "):
                    shown = lines[i + 1 :] if line.startswith("$ ") else []
                    found.append((page.name, command, shown))
    return found


def run(command: str, *more: str) -> str:
    arguments = [*shlex.split(command, comments=True)[2:], *more]
    result = CliRunner().invoke(plan, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_ledger_page_lists_every_byte_formula_as_it_runs() -> None:
    site = Site(find_machine("dgx-h200"), {"engram_tables": "ram"})
    request = Request(input_tokens=30_000, output_tokens=1_000)
    ledger = Planner(preset("v4.1-flash")).plan(request, "ced+csa2", site).ledger
    page = (ROOT / "docs/ledger.md").read_text(encoding="utf-8")
    assert ledger_table(line for line in ledger.lines if line.unit in ("B", "B/token")) in page


def test_the_planner_page_lists_every_named_machine() -> None:
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    for name, machine in machines().items():
        assert f"| `{name}` |" in page
        assert machine.source in page


def test_the_planner_page_shows_commands() -> None:
    assert sum(page == "planner.md" for page, *_ in commands()) >= 5


@pytest.mark.parametrize(("page", "command"), [entry[:2] for entry in commands()])
def test_every_plan_command_in_the_docs_runs_and_its_verdict_is_fits(
    page: str, command: str
) -> None:
    required = () if "--machine none" in command else ("--require-fit",)
    assert run(command, *required)


@pytest.mark.parametrize(
    ("command", "shown"), [(command, shown) for _, command, shown in commands() if shown]
)
def test_output_shown_in_the_docs_is_what_the_command_prints(
    command: str, shown: list[str]
) -> None:
    printed = [line.rstrip() for line in run(command).splitlines()]
    at = 0
    for line in (line.rstrip() for line in shown):
        if line == "...":
            continue
        assert line in printed[at:], f"{line!r} is not printed (in this order) by {command}"
        at += printed[at:].index(line) + 1
