"""One section of the human report, and the helpers that fill its cells. No layout here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cedar.planner.export import PlanReport
from cedar.units import format_count

Format = Callable[[float], str]


@dataclass(frozen=True)
class Section:
    """One block of the report.

    Attributes:
        title: a few words.
        header: column heads; the first column is left-aligned, the others right-aligned.
        rows: one tuple of cells each; a row of one cell is a subtitle.
        notes: sentences under the table.
        prose: whether columns hold sentences (left-aligned).
    """

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
    prose: bool = False


def flow_row(report: PlanReport, label: str, name: str, form: Format) -> tuple[str, ...]:
    """One ledger line of every flow; a dash where a flow has no such line."""
    cells = (plan.ledger.get(name) for plan in report.flows.values())
    return (label, *("-" if value is None else form(value) for value in cells))


def words(name: str) -> str:
    """An identifier as words."""
    return name.replace("_", " ")


def sequences(count: float) -> str:
    """1 -> "1 sequence", 8 -> "8 sequences"."""
    return f"{count:,} sequence" + ("" if count == 1 else "s")


def short(value: float) -> str:
    """Three digits, or whole with separators from 100 on."""
    return format_count(round(value)) if value >= 100 else f"{value:.3g}"
