"""Layout of a plan report as plain text or Markdown. No numbers are made here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from cedar.planner.export import PlanReport
from cedar.planner.ledger import LedgerLine
from cedar.planner.section import Section
from cedar.planner.sections import sections, title
from cedar.units import format_count

_WIDTH = 100


def to_text(report: PlanReport, *, explain: bool = False) -> str:
    """The report for a terminal."""
    blocks = ["\n".join(_wrap(line) for line in title(report))]
    blocks += [_text_section(section) for section in sections(report)]
    if explain:
        blocks.append(f"Ledger of flow {report.primary}\n" + report.main.ledger.explain())
    return "\n\n".join(blocks) + "\n"


def to_markdown(report: PlanReport, *, explain: bool = False) -> str:
    """The report as Markdown."""
    blocks = ["\n\n".join(title(report))]
    for section in sections(report):
        lines = [f"## {section.title}", "", _markdown_table(section)]
        if section.notes:
            lines += ["", *(f"- {note}" for note in section.notes)]
        blocks.append("\n".join(lines))
    if explain:
        blocks.append(
            f"## Ledger of flow {report.primary}\n\n" + ledger_table(report.main.ledger.lines)
        )
    return "\n\n".join(blocks) + "\n"


def ledger_table(lines: Iterable[LedgerLine]) -> str:
    """Ledger lines as a Markdown table: value, formula, kind and source of each."""
    rows = ["| line | value | formula | kind | source |", "|---|---:|---|---|---|"]
    for line in lines:
        value = format_count(line.value, 4)
        formula = f"`{line.formula}`" if line.inputs else line.formula
        unit = f" {line.unit}" if line.unit else ""
        rows.append(f"| `{line.name}` | {value}{unit} | {formula} | {line.kind} | {line.source} |")
    return "\n".join(rows)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _text_section(section: Section) -> str:
    lines = [section.title]
    if section.prose:
        for name, *cells in section.rows:
            lines.append(f"  {name}")
            for head, cell in zip(section.header[1:], cells, strict=True):
                lines.append(_wrap(cell, indent=f"    {head:<8} "))
    else:
        lines += _text_table(section)
    lines += [_wrap(note, indent="  * ") for note in section.notes]
    return "\n".join(lines)


def _text_table(section: Section) -> list[str]:
    full = [section.header, *(row for row in section.rows if len(row) > 1)]
    widths = [max(len(row[i]) for row in full) for i in range(len(section.header))]
    lines = []
    for row in (section.header, *section.rows):
        if len(row) == 1:
            lines.append(f"  {row[0]}:")
            continue
        cells = [
            cell.ljust(width) if _is_left(section, i) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return [line for line in lines if line.strip()]


def _is_left(section: Section, column: int) -> bool:
    return column == 0 or section.header[column] in ("can live in", "placed in", "because")


def _markdown_table(section: Section) -> str:
    width = len(section.header)
    rule = ["---" if section.prose or _is_left(section, i) else "---:" for i in range(width)]
    rows = [section.header, rule]
    for row in section.rows:
        rows.append((f"**{row[0]}**", *[""] * (width - 1)) if len(row) == 1 else row)
    return "\n".join("| " + " | ".join(cell.strip() for cell in row) + " |" for row in rows)
