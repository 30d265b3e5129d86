"""The arithmetic a ledger formula is written in: parsed once, evaluated exactly, never `eval`ed.

A formula is an expression over names of other ledger lines (dotted, as in `phases.encode.tokens`),
numbers, `+ - * / // %`, parentheses and the functions below. `/` is exact (a fraction), so totals
add up to the last byte. Because a formula is data, the page can evaluate the same text.

    min(a, b, ..) max(a, b, ..) floor(a)
    ceil_div(a, b)      smallest whole number >= a / b
    pow2ceil(a)         smallest power of two >= a, of 1, 2, 4, ..
    seen(n, r, cap)     sum over t = 1..n of min(t // r, cap): rows of ratio r that n causal
                        queries see, each at most `cap` of them
    touched(e, k, n)    experts of e that n tokens with k choices each touch, expected under
                        uniform routing: e * (1 - (1 - k / e) ** n)
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache

Number = int | float

_Exact = int | float | Fraction


def ceil_div(numerator: _Exact, denominator: _Exact) -> int:
    """Smallest whole number that is at least numerator / denominator."""
    return int(-((-numerator) // denominator))


def pow2ceil(value: _Exact) -> int:
    """Smallest power of two that is at least `value` (1 for values up to 1)."""
    return 1 << max(0, ceil_div(value, 1) - 1).bit_length()


def seen(queries: _Exact, ratio: _Exact, cap: _Exact) -> int:
    """Sum over t = 1..queries of min(t // ratio, cap), in closed form."""
    n, r, limit = int(queries), int(ratio), int(cap)
    if n <= 0 or limit <= 0:
        return 0
    full = min(n, limit * r - 1)
    groups, rest = divmod(full + 1, r)
    below = r * groups * (groups - 1) // 2 + groups * rest
    return below + limit * max(0, n - (limit * r - 1))


def touched(experts: _Exact, chosen: _Exact, tokens: _Exact) -> float:
    """Expected number of distinct experts that `tokens` tokens with `chosen` choices each touch."""
    e = float(experts)
    return e * (1.0 - math.pow(1.0 - float(chosen) / e, float(tokens)))


def _floor(value: _Exact) -> int:
    return int(value // 1)


_FUNCTIONS: Mapping[str, Callable[..., _Exact]] = {
    "min": min,
    "max": max,
    "floor": _floor,
    "ceil_div": ceil_div,
    "pow2ceil": pow2ceil,
    "seen": seen,
    "touched": touched,
}


def _divide(left: _Exact, right: _Exact) -> _Exact:
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    return Fraction(left) / Fraction(right)


_OPERATORS: Mapping[type[ast.operator], Callable[[_Exact, _Exact], _Exact]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


_Run = Callable[[Mapping[str, Number]], _Exact]


@lru_cache(maxsize=4096)
def _compiled(formula: str) -> tuple[_Run, tuple[str, ...]]:
    """The formula as a function of its names' values, and those names in order of appearance."""
    names: dict[str, None] = {}
    return _build(ast.parse(formula, mode="eval").body, formula, names), tuple(names)


def _build(node: ast.expr, formula: str, names: dict[str, None]) -> _Run:
    """One closure per node: formulas are evaluated far more often than they are parsed."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return lambda values: number
        case ast.Name() | ast.Attribute():
            name = _dotted(node, formula)
            names[name] = None
            return lambda values: values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            apply = _OPERATORS[type(op)]
            first, second = _build(left, formula, names), _build(right, formula, names)
            return lambda values: apply(first(values), second(values))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _build(operand, formula, names)
            return lambda values: -inner(values)
        case ast.Call(func=ast.Name(id=called), args=arguments, keywords=[]) if (
            called in _FUNCTIONS
        ):
            function = _FUNCTIONS[called]
            parts = [_build(argument, formula, names) for argument in arguments]
            return lambda values: function(*(part(values) for part in parts))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed in the formula {formula!r}")


def _dotted(node: ast.expr, formula: str) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, formula)}.{node.attr}"
    raise ValueError(f"{ast.unparse(node)!r} is not a name in the formula {formula!r}")


def names_in(formula: str) -> tuple[str, ...]:
    """Names a formula depends on, in order of first appearance.

    Raises:
        ValueError: the formula uses something outside the language.
        SyntaxError: it is no expression.
    """
    return _compiled(formula)[1]


def evaluate(formula: str, values: Mapping[str, Number]) -> Number:
    """Value of a formula; whole results are `int`, others `float`.

    Raises:
        KeyError: a name has no value.
    """
    result = _compiled(formula)[0](values)
    if isinstance(result, Fraction):
        return result.numerator if result.denominator == 1 else float(result)
    return result


def total_of(terms: Iterable[str]) -> str:
    """Sum of formulas with equal ones gathered: "19 * (a) + 1 * (b)"."""
    counts = Counter(term for term in terms if term != "0")
    return " + ".join(f"{count} * ({term})" for term, count in counts.items()) or "0"
