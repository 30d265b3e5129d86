"""Ledger lines: values come from formulas, copies recompute, every number can say why."""

from __future__ import annotations

import pytest

from cedar.config import preset
from cedar.planner.flows import Planner
from cedar.planner.ledger import Ledger
from cedar.planner.request import Request


def small() -> Ledger:
    ledger = Ledger()
    ledger.add("tokens", 31_000, "tokens", "given", "the request")
    ledger.add("row.bytes", 356, "B", "288 + 68", "cedar.formats.rows", "derived")
    ledger.derive("kv", "row.bytes * (tokens // 4) * 10", "B", "rows of the owners")
    ledger.derive("kv_mb", "kv / 1000000", "MB", "powers of 1000")
    return ledger


def test_a_value_is_computed_from_its_printed_formula() -> None:
    ledger = small()
    assert ledger["kv"] == 27_590_000
    assert dict(ledger.line("kv").inputs) == {"row.bytes": 356, "tokens": 31_000}


def test_a_copy_with_another_input_recomputes_all_that_depends_on_it() -> None:
    ledger = small()
    other = ledger.with_values({"tokens": 4})
    assert (other["kv"], other["kv_mb"]) == (3_560, 0.00356)
    assert ledger["kv"] == 27_590_000


def test_one_value_can_be_asked_at_other_inputs_without_a_copy() -> None:
    assert small().value_at("kv_mb", {"tokens": 4_000}) == 3.56


def test_a_computed_line_cannot_be_set_from_outside() -> None:
    with pytest.raises(ValueError, match="is computed"):
        small().with_values({"kv": 1})


def test_a_name_stands_for_one_line_only() -> None:
    ledger = small()
    with pytest.raises(ValueError, match="already has"):
        ledger.derive("kv", "tokens", "B", "again")


def test_a_formula_may_only_name_lines_above_it() -> None:
    with pytest.raises(KeyError):
        small().derive("late", "later * 2", "B", "order")


def test_names_become_nested_paths_and_groups_can_be_left_out() -> None:
    assert small().nested() == {
        "tokens": 31_000, "row": {"bytes": 356}, "kv": 27_590_000, "kv_mb": 27.59,
    }  # fmt: skip
    assert "row" not in small().nested(without=("row",))


def test_an_explanation_shows_formula_inputs_kind_and_source() -> None:
    text = small().line("kv").explain()
    for part in ("kv = 27,590,000 B", "[derived]", "row.bytes * (tokens // 4) * 10",
                 "tokens = 31,000", "source: rows of the owners"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("name", ["article", "v4.1-flash", "nano", "tiny"])
def test_every_line_of_a_plan_has_a_formula_a_source_and_a_known_kind(name: str) -> None:
    plans = Planner(preset(name)).plan_all(Request(input_tokens=900, output_tokens=100))
    for plan in plans.values():
        for line in plan.ledger.lines:
            assert line.formula, line.name
            assert line.source, line.name
            assert line.kind in ("given", "derived", "measured", "quoted")
