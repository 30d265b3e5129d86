"""Counts of single tokens for `/metrics`: how many, and the time between two of a completion.

Made by `metrics.py`; told of every token by `completion.py`. prometheus_client takes a lock for
every number it is told, which per token and stream was a tenth of serving; here a token costs one
look-up in the bounds, and the families are built when somebody scrapes. Used on the asyncio loop only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenMetrics(Collector):
    """`generation_tokens` and `inter_token_latency_seconds`.

    Args:
        model_name: label of both.   bounds: upper bounds of the buckets in seconds, ascending.
    """

    def __init__(self, model_name: str, bounds: Sequence[float]) -> None:
        self._label, self._bounds = [model_name], tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last one is above every bound
        self._sum = 0.0
        self._tokens = 0

    def add(self, seconds: float | None) -> None:
        """A token has been handed to its client, `seconds` after the one before."""
        self._tokens += 1
        if seconds is not None:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._sum += seconds

    def collect(self) -> Iterable[Metric]:
        """Both families as they are now."""
        tokens = CounterMetricFamily(
            "cedar:generation_tokens", "Tokens generated", labels=["model_name"]
        )
        tokens.add_metric(self._label, self._tokens)
        yield tokens
        gaps = HistogramMetricFamily(
            "cedar:inter_token_latency_seconds", "Between two tokens of a completion",
            labels=["model_name"],
        )  # fmt: skip
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        gaps.add_metric(self._label, buckets, self._sum)
        yield gaps
