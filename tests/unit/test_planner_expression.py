"""The formula language: exact arithmetic, its functions against brute force, and what it refuses."""

from __future__ import annotations

import pytest

from cedar.planner.expression import ceil_div, evaluate, names_in, pow2ceil, seen, touched


def test_division_is_exact_and_whole_results_are_integers() -> None:
    value = evaluate("a * (1 / 3 + 1 / 3 + 1 / 3)", {"a": 356})
    assert value == 356
    assert isinstance(value, int)


def test_a_dotted_name_is_one_name() -> None:
    assert names_in("2 * phases.encode.tokens + rows.main_bytes") == (
        "phases.encode.tokens",
        "rows.main_bytes",
    )
    assert evaluate("2 * phases.encode.tokens", {"phases.encode.tokens": 21}) == 42


def test_precedence_floor_division_and_minus_are_those_of_arithmetic() -> None:
    assert evaluate("-a + 7 // 2 * 2 - 7 % 4", {"a": 1}) == -1 + 3 * 2 - 3


@pytest.mark.parametrize(("ratio", "cap"), [(1, 5), (2, 3), (3, 1), (4, 100), (2, 0)])
def test_seen_is_the_sum_of_capped_visible_rows(ratio: int, cap: int) -> None:
    for queries in range(40):
        assert seen(queries, ratio, cap) == sum(min(t // ratio, cap) for t in range(1, queries + 1))


def test_seen_of_a_million_queries_is_closed_form() -> None:
    assert seen(1_048_576, 1, 1_048_576) == 1_048_576 * 1_048_577 // 2


def test_powers_of_two_and_ceilings_round_up_only_when_needed() -> None:
    gib = 2**30
    assert pow2ceil(3 * gib + 1) == 4 * gib
    assert pow2ceil(4 * gib) == 4 * gib
    assert pow2ceil(1) == 1
    assert [pow2ceil(value) for value in (0, -1, -5, 0.5)] == [1, 1, 1, 1]
    assert ceil_div(31_000, 128) == 243
    assert ceil_div(128, 128) == 1


def test_one_token_touches_exactly_its_own_experts_and_many_touch_all() -> None:
    assert touched(384, 6, 1) == pytest.approx(6)
    assert touched(384, 6, 100_000) == pytest.approx(384)


@pytest.mark.parametrize(
    "formula",
    ["__import__('os')", "a[0]", "a ** 2", "a if a else b", "sum(a)", "'text'", "a and b"],
)
def test_anything_outside_the_language_is_refused(formula: str) -> None:
    with pytest.raises(ValueError):
        names_in(formula)
