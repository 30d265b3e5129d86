"""Interleaved timing: A and B in one run, warm-up discarded, medians, and the spread of the ratio.

Times alone mean nothing on a shared machine; a ratio of two things timed turn by turn does. Used by all
benchmarks. Source of the method: A B B A ordering cancels slow drifts of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Two things timed against each other.

    Attributes:
        a_seconds, b_seconds: medians.
        speedup: b / a, the median over rounds.   low, high: its quartiles.
        rounds: how many.
    """

    a_seconds: float
    b_seconds: float
    speedup: float
    low: float
    high: float
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "a_seconds": self.a_seconds,
            "b_seconds": self.b_seconds,
            "speedup": self.speedup,
            "speedup_quartiles": [self.low, self.high],
            "rounds": self.rounds,
        }


def timed(work: Work) -> float:
    """Seconds of one run."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def interleave(a: Work, b: Work, *, rounds: int = 7, a_repeats: int = 1) -> Ratio:
    """Time A and B turn by turn.

    Args:
        rounds: at least 5, after one discarded warm-up of each.
        a_repeats: runs of A per turn, for an A much shorter than B; its time is their mean.
    """
    if rounds < 5:
        raise ValueError(f"rounds={rounds}: a median of fewer than 5 means little")

    def turn_of_a() -> float:
        return timed(lambda: [a() for _ in range(a_repeats)]) / a_repeats

    turn_of_a()
    timed(b)
    a_times, b_times = [], []
    for number in range(rounds):
        if number % 2:
            b_times.append(timed(b))
            a_times.append(turn_of_a())
        else:
            a_times.append(turn_of_a())
            b_times.append(timed(b))
    return ratio_of(a_times, b_times)


def ratio_of(a_times: list[float], b_times: list[float]) -> Ratio:
    """Medians and spread of times that were taken turn by turn."""
    ratios = sorted(y / x for x, y in zip(a_times, b_times, strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    return Ratio(
        statistics.median(a_times),
        statistics.median(b_times),
        statistics.median(ratios),
        quartiles[0],
        quartiles[2],
        len(ratios),
    )


def median_seconds(work: Work, rounds: int = 7) -> float:
    """Median time of one thing, after one discarded run."""
    work()
    return statistics.median(timed(work) for _ in range(rounds))
