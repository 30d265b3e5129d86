"""Bytes, tokens, rates and seconds: parsing what people type, formatting what they read. No torch.

Nothing else in cedar parses or formats such a number. kB/MB/GB/TB are powers of 1000, KiB/MiB/GiB/
TiB powers of 1024, always written out: a bare "80G" is refused because it could mean either.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation

from cedar.errors import UsageError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_NUMBER = re.compile(
    r"^([+-]?[0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|[+-]?\.[0-9]+)\s*(.*)$"
)
#: Lower case is decimal and upper case binary, as in vLLM's --max-model-len.
_TOKEN_SUFFIX = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def _split(text: str, what: str, example: str) -> tuple[Decimal, str]:
    match = _NUMBER.match(text.strip())
    if match is None:
        raise UsageError(f"{what} {text!r} is not a number; write it like {example}")
    try:
        number = Decimal(match[1].replace("_", "").replace(",", ""))
    except InvalidOperation:
        raise UsageError(f"{what} {text!r} is not a number; write it like {example}") from None
    return number, match[2].strip()


def parse_bytes(text: str, what: str = "size") -> int:
    """Whole bytes from "1000", "24 GiB" or "141GB".

    Raises:
        UsageError: no number, an unknown or ambiguous unit, not positive, or not whole bytes.
    """
    number, unit = _split(text, what, "80GB or 24GiB")
    key = unit.lower()
    if key and not key.endswith("b"):
        raise UsageError(
            f"{what} {text!r} has the unit {unit!r}; write {unit}B (powers of 1000) or "
            f"{unit}iB (powers of 1024)"
        )
    scale = (_DECIMAL | _BINARY).get(key.removesuffix("b"))
    if scale is None:
        raise UsageError(
            f"{what} {text!r} has the unknown unit {unit!r}; allowed: B, kB to PB, KiB to PiB"
        )
    return _whole(number * scale, text, what, "bytes")


def parse_tokens(text: str, what: str = "tokens") -> int:
    """Whole tokens from "30000", "30,000", "30k" (thousands) or "128K" (1024s).

    Raises:
        UsageError: not a positive whole number, or an unknown suffix.
    """
    number, suffix = _split(text, what, "30000, 30k (30,000) or 128K (131,072)")
    if suffix and suffix not in _TOKEN_SUFFIX:
        raise UsageError(f"{what} {text!r} has the unknown suffix {suffix!r}; allowed: k, m, K, M")
    return _whole(number * _TOKEN_SUFFIX.get(suffix, 1), text, what, "tokens")


def _whole(value: Decimal, text: str, what: str, unit: str) -> int:
    if value <= 0:
        raise UsageError(f"{what} {text!r} must be at least 1")
    if value != value.to_integral_value():
        raise UsageError(f"{what} {text!r} is {value} {unit}; a whole number is needed")
    return int(value)


def parse_rate(text: str, unit: str, what: str) -> float:
    """A rate in units a second: `parse_rate("4.8TB/s", "B", ...)`, or "989T" FLOP.

    The unit and the "/s" may be left out; the prefix is decimal, or binary for bytes ("GiB/s").

    Raises:
        UsageError: no number, an unknown prefix, or not positive.
    """
    number, rest = _split(text, what, f"2.5T{unit}/s")
    key = rest.lower().removesuffix("/s").removesuffix("s").removesuffix(unit.lower()).strip()
    scale = (_DECIMAL | _BINARY).get(key)
    if scale is None:
        raise UsageError(
            f"{what} {text!r} has the unknown unit {rest!r}; write it like 2.5T{unit}/s"
        )
    value = float(number * scale)
    if value <= 0 or not math.isfinite(value):
        raise UsageError(f"{what} {text!r} must be a positive number")
    return value


def parse_fraction(text: str, what: str) -> float:
    """A share in 0..1 from "0.9" or "90%".

    Raises:
        UsageError: not a number, or outside 0..1.
    """
    number, unit = _split(text, what, "0.9 or 90%")
    if unit not in ("", "%"):
        raise UsageError(f"{what} {text!r} has the unknown unit {unit!r}; allowed: %")
    value = float(number / 100 if unit else number)
    if not 0 <= value <= 1:
        raise UsageError(f"{what} {text!r} is out of range: allowed 0 to 1, or 0% to 100%")
    return value


def _prefixed(value: float, unit: str, digits: int) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:,.{digits}f} {prefix}{unit}"
    return f"{value:,.0f} {unit}" if float(value).is_integer() else f"{value:,.{digits}f} {unit}"


def format_bytes(value: float, digits: int = 2) -> str:
    """Powers of 1000: 27590000 -> "27.59 MB"."""
    return _prefixed(value, "B", digits)


def format_gib(value: float) -> str:
    """Powers of 1024, in GiB: 202758032400 -> "188.83 GiB"."""
    return f"{value / 2**30:,.2f} GiB"


def format_count(value: float, digits: int = 2) -> str:
    """A number with at most `digits` decimals and thousands separators: 30000 -> "30,000"."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}f}"


def format_flops(value: float) -> str:
    """1.236e14 -> "123.60 TFLOP"."""
    return _prefixed(value, "FLOP", 2)


def format_seconds(value: float) -> str:
    """Three significant digits: 0.0124 -> "12.4 ms", 75 -> "75 s", 9000 -> "2.5 h"."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return (
                f"{value / scale:.3g} {unit}"
                if value < 1000 * scale
                else f"{value / scale:,.0f} {unit}"
            )
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


def format_percent(value: float) -> str:
    """0.5 -> "50%"."""
    return f"{100 * value:.3g}%"
