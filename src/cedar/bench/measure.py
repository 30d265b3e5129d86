"""Interleaved timing: A and B in one run, warm-up discarded, medians, and the spread of the ratio.

Times alone mean nothing on a shared machine; a ratio of two things timed turn by turn does. Used by all
benchmarks. Source of the method: A B B A ordering cancels slow drifts of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Work = Callable[[], object]
Taken = TypeVar("Taken")

_TURN_SECONDS = 0.02


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


def interleave(a: Work, b: Work, *, rounds: int = 7) -> Ratio:
    """Time A and B turn by turn.

    A turn repeats work shorter than 20 ms until it has taken about that, and counts the mean: what a
    turn of the other side left cold in the caches is then a small part of it. Each result is dropped
    before the next is made, as a model does.

    Args:
        rounds: at least 5, after one discarded warm-up of each.
    """
    check_rounds(rounds)
    return ratio_of(*alternate(_turn(a), _turn(b), rounds=rounds))


def check_rounds(rounds: int) -> None:
    """Refuse too few rounds; called before anything is warmed up.

    Raises:
        ValueError: fewer than 5.
    """
    if rounds < 5:
        raise ValueError(f"rounds={rounds}: a median of fewer than 5 means little")


def alternate(
    turn_of_a: Callable[[], Taken], turn_of_b: Callable[[], Taken], *, rounds: int
) -> tuple[list[Taken], list[Taken]]:
    """What each turn of A and of B took, in the order A B B A; both are warm already."""
    a_taken, b_taken = [], []
    for number in range(rounds):
        if number % 2:
            b_taken.append(turn_of_b())
            a_taken.append(turn_of_a())
        else:
            a_taken.append(turn_of_a())
            b_taken.append(turn_of_b())
    return a_taken, b_taken


def _turn(work: Work) -> Callable[[], float]:
    """Warm some work up; what takes one turn of it, in seconds a run."""
    seconds = timed(work)
    if seconds < _TURN_SECONDS:  # the first run of all is no measure: it may set things up
        seconds = max(timed(work), 1e-7)
    repeats = max(1, round(_TURN_SECONDS / seconds))

    def turn() -> None:
        # Results kept until the end would need memory of their own, and its page faults would be
        # timed: hundreds of tensors of 2 MB took longer to map than to fill.
        for _ in range(repeats):
            work()

    return lambda: timed(turn) / repeats


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
    """Median time of one thing, in turns as `interleave` takes them."""
    turn = _turn(work)
    return statistics.median(turn() for _ in range(rounds))
