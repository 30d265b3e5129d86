"""Bytes, tokens, rates and seconds as people type and read them."""

from __future__ import annotations

import pytest

from cedar.errors import UsageError
from cedar.units import (
    format_bytes,
    format_count,
    format_flops,
    format_gib,
    format_percent,
    format_seconds,
    parse_bytes,
    parse_fraction,
    parse_rate,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1000", 1_000), ("1 kB", 1_000), ("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30),
     ("1.5TB", 1_500_000_000_000), ("1_024B", 1_024), ("3 MiB", 3 * 2**20), ("5mb", 5 * 10**6)],
)  # fmt: skip
def test_sizes_are_powers_of_1000_or_of_1024_as_written(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "80G", "1.5B", "0", "-4GB", "3 apples", "nan"])
def test_a_size_that_is_ambiguous_or_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("30000", 30_000), ("30,000", 30_000), ("30k", 30_000), ("128K", 131_072), ("1M", 2**20),
     ("1m", 10**6), ("25.6k", 25_600), (" 7 ", 7)],
)  # fmt: skip
def test_token_suffixes_are_decimal_in_lower_and_binary_in_upper_case(
    text: str, value: int
) -> None:
    assert parse_tokens(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "0.0001k", "", "ten", "3Z", "0x10"])
def test_tokens_that_are_no_positive_whole_number_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="tokens"):
        parse_tokens(text)


def test_rates_take_prefix_unit_and_per_second_or_none_of_them() -> None:
    for text in ("4.8TB/s", "4.8 TB/s", "4.8T", "4.8e12", "4800GB"):
        assert parse_rate(text, "B", "bandwidth") == pytest.approx(4.8e12)
    for text in ("989TFLOP/s", "989TFLOPS", "989T", "989e12"):
        assert parse_rate(text, "FLOP", "flops") == pytest.approx(9.89e14)
    assert parse_rate("1GiB/s", "B", "bandwidth") == 2**30
    for text in ("0", "-3T", "fast", "3 W"):
        with pytest.raises(UsageError, match="flops"):
            parse_rate(text, "FLOP", "flops")


def test_shares_are_fractions_or_percent() -> None:
    assert parse_fraction("90%", "rate") == parse_fraction("0.9", "rate") == 0.9
    for text in ("1.01", "-1%", "101%", "half"):
        with pytest.raises(UsageError, match="rate"):
            parse_fraction(text, "rate")


def test_numbers_are_written_with_their_unit_and_no_noise() -> None:
    assert format_bytes(27_590_000) == "27.59 MB"
    assert format_bytes(110_360_000, 1) == "110.4 MB"
    assert format_bytes(512) == "512 B"
    assert format_gib(202_758_032_400) == "188.83 GiB"
    assert format_count(480_000) == "480,000"
    assert format_count(79.5) == "79.50"
    assert format_flops(5.194e14) == "519.40 TFLOP"
    assert format_percent(0.125) == "12.5%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3e-9, "3 ns"), (0.000741, "741 us"), (0.0124, "12.4 ms"), (75, "75 s"),
     (2_000, "2,000 s"), (9_000, "2.5 h")],
)  # fmt: skip
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
