"""`Ledger`: numbers that can say where they come from. Knows nothing about models or machines.

A line is a value with its unit, its formula, the lines it was computed from, its kind and its
source. Values of derived lines are computed FROM their formula text, so the printed formula is the
one that ran, and a copy of the ledger with other inputs (`with_values`) recomputes every line that
depends on them. Lines are added in order; a formula may only name lines above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cedar.planner.expression import Number, evaluate, names_in

#: given    the request, the command line, or a field of the config: an input, not a result
#: derived  computed here, from shapes or from other lines
#: measured read from a file's headers, from this machine, or by running the model
#: quoted   printed by somebody else; never an input of a derived line unless that is said
Kind = Literal["given", "derived", "measured", "quoted"]


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One number.

    Attributes:
        name: dotted, unique in its ledger; also its path in the JSON document.
        value: the number, in `unit`.
        unit: "B", "tokens", "FLOP", "parameters", ...; "" for a plain ratio or count.
        formula: an expression over other lines, or words when there are no `inputs`.
        inputs: the lines the formula names, with the values it saw.
        kind: given, derived, measured or quoted.
        source: where the formula or the constant comes from.
    """

    name: str
    value: Number
    unit: str
    formula: str
    inputs: Mapping[str, Number]
    kind: Kind
    source: str

    def explain(self) -> str:
        """The line, its formula, its inputs and its source as text."""
        unit = f" {self.unit}" if self.unit else ""
        lines = [
            f"{self.name} = {_plain(self.value)}{unit}   [{self.kind}]",
            f"    = {self.formula}",
        ]
        if self.inputs:
            inputs = ", ".join(f"{name} = {_plain(value)}" for name, value in self.inputs.items())
            lines.append(f"    with {inputs}")
        lines.append(f"    source: {self.source}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON data."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "kind": self.kind,
            "source": self.source,
        }


def _plain(value: Number) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


class Ledger(Mapping[str, Number]):
    """Lines in order; `ledger[name]` is a value, `ledger.line(name)` the whole line."""

    def __init__(self) -> None:
        self._lines: dict[str, LedgerLine] = {}

    def __getitem__(self, name: str) -> Number:
        return self._lines[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def lines(self) -> tuple[LedgerLine, ...]:
        """All lines, in order."""
        return tuple(self._lines.values())

    def line(self, name: str) -> LedgerLine:
        """One whole line."""
        return self._lines[name]

    def add(
        self, name: str, value: Number, unit: str, words: str, source: str, kind: Kind = "given"
    ) -> Number:
        """Add a line that is not computed from others: a constant, a count, a measurement."""
        return self._append(LedgerLine(name, value, unit, words, {}, kind, source))

    def derive(
        self, name: str, formula: str, unit: str, source: str, kind: Kind = "derived"
    ) -> Number:
        """Add a line computed from its formula over lines above it."""
        inputs = {used: self[used] for used in names_in(formula)}
        value = evaluate(formula, inputs)
        return self._append(LedgerLine(name, value, unit, formula, inputs, kind, source))

    def _append(self, line: LedgerLine) -> Number:
        if line.name in self._lines:
            raise ValueError(f"the ledger already has a line {line.name!r}")
        self._lines[line.name] = line
        return line.value

    def with_values(self, changes: Mapping[str, Number]) -> Ledger:
        """A copy in which some constants have other values and every formula is evaluated again.

        Raises:
            KeyError: a name is not a line; ValueError: it is a computed line, not a constant.
        """
        for name in changes:
            if self._lines[name].inputs:
                raise ValueError(
                    f"{name!r} is computed ({self._lines[name].formula}); change its inputs"
                )
        copy = Ledger()
        for line in self.lines:
            if line.inputs:
                copy.derive(line.name, line.formula, line.unit, line.source, line.kind)
            else:
                copy._append(replace(line, value=changes.get(line.name, line.value)))
        return copy

    def value_at(self, name: str, changes: Mapping[str, Number]) -> Number:
        """One line's value if some constants had other values; evaluates what it depends on."""
        known: dict[str, Number] = dict(changes)

        def value(wanted: str) -> Number:
            if wanted not in known:
                line = self._lines[wanted]
                known[wanted] = line.value
                if line.inputs:
                    known[wanted] = evaluate(
                        line.formula, {used: value(used) for used in line.inputs}
                    )
            return known[wanted]

        return value(name)

    def nested(self, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """Values by dotted path as nested dictionaries, leaving out the named groups."""
        tree: dict[str, Any] = {}
        for line in self.lines:
            *groups, leaf = line.name.split(".")
            if groups and groups[0] in without:
                continue
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
            node[leaf] = line.value
        return tree

    def explain(self) -> str:
        """Every line with its formula, inputs, kind and source."""
        return "\n".join(line.explain() for line in self.lines)
