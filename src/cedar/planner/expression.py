"""The arithmetic a ledger formula is written in: parsed once, evaluated exactly, never `eval`ed.

A formula is an expression over names of other ledger lines (dotted, as in `phases.encode.tokens`),
numbers, `+ - * / // %`, parentheses and the functions below. `/` is exact (a fraction), so totals
add up to the last byte. Because a formula is data, the page can evaluate the same text.

    min(a, b, ..) max(a, b, ..) floor(a)
    ceil_div(a, b)      smallest whole number >= a / b
    pow2ceil(a)         smallest power of two >= a
    seen(n, r, cap)     sum over t = 1..n of min(t // r, cap): rows of ratio r that n causal
                        queries see, each at most `cap` of them
    touched(e, k, n)    experts of e that n tokens with k choices each touch, expected under
                        uniform routing: e * (1 - (1 - k / e) ** n)
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache

Number = int | float

_Exact = int | float | Fraction


def ceil_div(numerator: _Exact, denominator: _Exact) -> int:
    """Smallest whole number that is at least numerator / denominator."""
    return int(-((-numerator) // denominator))


def pow2ceil(value: _Exact) -> int:
    """Smallest power of two that is at least `value` (1 for values up to 1)."""
    return 1 << max(0, (ceil_div(value, 1) - 1).bit_length())


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


@lru_cache(maxsize=4096)
def _parse(formula: str) -> tuple[ast.expr, tuple[str, ...]]:
    """Syntax tree and the names used, in order of appearance."""
    tree = ast.parse(formula, mode="eval").body
    names: dict[str, None] = {}
    _collect(tree, formula, names)
    return tree, tuple(names)


def _collect(node: ast.expr, formula: str, names: dict[str, None]) -> None:
    if isinstance(node, ast.Name | ast.Attribute):
        names[_dotted(node, formula)] = None
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _collect(node.left, formula, names)
        _collect(node.right, formula, names)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        _collect(node.operand, formula, names)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        for argument in node.args:
            _collect(argument, formula, names)
    elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
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
    return _parse(formula)[1]


def evaluate(formula: str, values: Mapping[str, Number]) -> Number:
    """Value of a formula; whole results are `int`, others `float`.

    Raises:
        KeyError: a name has no value.
    """
    result = _evaluate(_parse(formula)[0], formula, values)
    if isinstance(result, Fraction):
        return result.numerator if result.denominator == 1 else float(result)
    return result


def _evaluate(node: ast.expr, formula: str, values: Mapping[str, Number]) -> _Exact:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](
                _evaluate(left, formula, values), _evaluate(right, formula, values)
            )
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, formula, values)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_evaluate(a, formula, values) for a in arguments))
        case _:
            return values[_dotted(node, formula)]
