"""One source of truth: the page's arithmetic is the planner's, to the last byte.

Numbers are exact (fractions) or IEEE doubles on both sides, so they must be equal; only `touched`
uses a power, whose last bit is the platform's.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from click.testing import CliRunner
from opened_page import Opener

from cedar.cli.plan import plan
from cedar.page.figures import DEFAULT_MODELS, page_data
from cedar.planner.expression import evaluate
from cedar.planner.flows import Planner
from cedar.planner.request import FLOWS, Request
from cedar.planner.source import resolve_model

#: Evaluates ledger programs for many requests: [{line: "number"}] in the order asked for.
EVALUATE_PROGRAMS = """async ([data, model, flow, requests]) => {
  const { Ledger } = await import("cedar/ledger.js");
  const { program } = data.models.find(({ name }) => name === model).flows[flow];
  const lines = program.map((position) => data.lines[position]);
  return requests.map((given) => {
    const ledger = new Ledger(lines, given);
    return Object.fromEntries(lines.map(({ name }) => [name, String(ledger.get(name))]));
  });
}"""

EVALUATE_FORMULAS = """async (cases) => {
  const { evaluate } = await import("cedar/expression.js");
  const { operand, stored } = await import("cedar/exact.js");
  return cases.map(([formula, names]) => {
    const value = (name) => stored(operand(names[name]));
    try {
      return String(evaluate(formula, value));
    } catch (error) {
      return error.message;
    }
  });
}"""


def requests(seed: int, count: int) -> list[dict[str, int]]:
    """Requests that straddle windows, groups and blocks, and some up to a million tokens."""
    draw = random.Random(seed)
    sizes = [1, 2, 3, 63, 64, 127, 128, 129, 511, 512, 2047, 2048, 30_000, 900_000]
    found = []
    for _ in range(count):
        size = draw.choice([draw.choice(sizes), draw.randint(1, 1_000_000)])
        found.append({
            "input_tokens": size,
            "output_tokens": draw.choice([1, 2, 7, 1000, draw.randint(1, 40_000)]),
            "tokens_per_turn": draw.choice([1, 760, draw.randint(1, 100_000)]),
        })  # fmt: skip
    return found


def same(shown: str, computed: float) -> bool:
    """Equal to the last digit; a Python int is compared digit by digit."""
    return shown == str(computed) if isinstance(computed, int) else float(shown) == computed


def test_every_line_of_every_flow_equals_the_planner_for_many_requests(open_page: Opener) -> None:
    page = open_page().page
    planners = [Planner(resolve_model(model)) for model in DEFAULT_MODELS]
    data = page_data(planners, Request(input_tokens=30_000, output_tokens=1_000), "none")
    for planner in planners:
        model = planner.model.name
        for flow in FLOWS:
            asked = requests(len(model) + len(flow), 2)
            shown = page.evaluate(EVALUATE_PROGRAMS, [data, model, flow, asked])
            for given, lines in zip(asked, shown, strict=True):
                ledger = planner.plan(Request(**given), flow).ledger
                assert list(lines) == list(ledger)
                wrong = {name: (lines[name], ledger[name]) for name in ledger
                         if not same(lines[name], ledger[name])}  # fmt: skip
                assert wrong == {}, (model, flow, given)


def _formula(draw: random.Random, depth: int) -> str:
    """A random formula of the ledger's language over a, b, c and numbers."""
    if depth == 0:
        return draw.choice(["a", "b.x", "c", str(draw.randint(0, 10**12)), "2.5", "0.1", "1e3"])
    one, two, three = (_formula(draw, depth - 1) for _ in range(3))
    return draw.choice([
        f"{one} + {two}", f"{one} - {two}", f"({one}) * ({two})", f"({one}) / ({two})",
        f"({one}) // ({two})", f"({one}) % ({two})", f"-({one})", f"min({one}, {two}, {three})",
        f"max({one}, {two})", f"floor({one})", f"ceil_div({one}, {two})",
        f"seen({one}, 1 + floor(max(0, {two})) % 9, {three})", f"pow2ceil({one})",
    ])  # fmt: skip


def test_random_formulas_mean_the_same_in_both_languages(open_page: Opener) -> None:
    draw = random.Random(4)
    cases: list[tuple[str, dict[str, float]]] = []
    for _ in range(1000):
        values = {"a": draw.randint(-9, 10**6), "b.x": draw.randint(1, 10**16) / 8,
                  "c": draw.uniform(-1e6, 1e6)}  # fmt: skip
        cases.append((_formula(draw, draw.randint(1, 3)), values))
    shown = open_page().page.evaluate(EVALUATE_FORMULAS, cases)
    divided = 0
    for (formula, values), text in zip(cases, shown, strict=True):
        numbers = {name: int(v) if float(v).is_integer() else v for name, v in values.items()}
        try:
            computed = evaluate(formula, numbers)
        except ZeroDivisionError:
            assert text == "division by zero", formula
            divided += 1
            continue
        assert same(text, computed), (formula, values, text, computed)
    assert divided < len(cases) / 4


def test_what_is_outside_the_language_is_refused(open_page: Opener) -> None:
    formulas = ["", "a +", "(a", "a b", "a ** 2", "unknown(a)", "a[0]", "min(a,)", "a.", "a if a"]
    messages = open_page().page.evaluate(EVALUATE_FORMULAS, [[f, {"a": 1}] for f in formulas])
    for formula, message in zip(formulas, messages, strict=True):
        assert "formula" in message, formula


def test_touched_experts_agree_to_the_last_digits(open_page: Opener) -> None:
    formula = "touched(e, k, n)"
    cases = [(formula, {"e": e, "k": k, "n": n}) for e, k, n in
             [(384, 6, 1), (384, 6, 128), (8, 2, 3), (384, 6, 30_000), (4, 4, 2)]]  # fmt: skip
    shown = open_page().page.evaluate(EVALUATE_FORMULAS, cases)
    for (_, values), text in zip(cases, shown, strict=True):
        assert float(text) == pytest.approx(evaluate(formula, values), rel=1e-12)


def _at(document: dict[str, Any], flow: str, line: str) -> Any:
    """A line of a flow in the document of `cedar plan --json`; None if it is not in it."""
    if line in document["request"]:
        return document["request"][line]
    node: Any = document["flows"][flow]
    for part in line.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("preset:article", (30_000, 1_000, 760)),
        ("preset:article", (1, 1, 1)),
        ("preset:v4.1-flash", (1_000_000, 32_123, 5_000)),
        ("preset:article-thin", (129, 3, 64)),
        ("nano", (65_537, 640, 1_000)),
    ],
)
def test_numbers_shown_equal_cedar_plan_json(
    open_page: Opener, model: str, sizes: tuple[int, int, int]
) -> None:
    request = dict(zip(("input_tokens", "output_tokens", "tokens_per_turn"), sizes, strict=True))
    options = [text for name, size in request.items()
               for text in (f"--{name.replace('_', '-')}", str(size))]  # fmt: skip
    result = CliRunner().invoke(plan, [model, "--machine", "none", "--json", *options])
    document = json.loads(result.stdout)
    opened = open_page(model=model, **request)
    assert opened.problem() == ""
    opened.open_ledger()
    shown = opened.values()
    compared = 0
    for (flow, line), value in shown.items():
        computed = _at(document, flow, line)
        if computed is not None:
            assert value == computed, (flow, line)
            compared += 1
    assert compared > 120
    assert {flow for flow, _ in shown} == set(FLOWS)
    for flow in FLOWS:
        for line in ("prefill_activation", "kv_bytes", "window_bytes", "persisted_bytes"):
            assert shown[flow, line] == document["flows"][flow][line]
