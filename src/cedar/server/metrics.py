"""`/metrics`: vLLM's names, labels and units with the prefix `cedar:`, so that dashboards port.

Counts of requests are taken on the asyncio side, where a token is seen by its client; work and
cache counts are the latest that the engine has told. Times are monotonic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cedar.engine.async_engine import AsyncEngine
from cedar.engine.engine_status import DiskStats
from cedar.engine.request import Request
from cedar.server.token_metrics import TokenMetrics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counters of one server.

    Args:
        engine: read at every scrape.   model_name: label of everything.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"cedar:{name}", text, ["model_name"], registry=self.registry)
            return made.labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(
                f"cedar:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return made.labels(model_name)

        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that were started")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in memory")
        self._hits = counter("prefix_cache_hits", "Prompt tokens used from memory")
        self._has_disk = engine.info.has_store
        if self._has_disk:
            self._disk_queries = counter(
                "external_prefix_cache_queries", "Prompt tokens beyond memory, looked up on disk"
            )
            self._disk_hits = counter("external_prefix_cache_hits", "Prompt tokens used from disk")
            self._disk_read = histogram("prefix_store_read_seconds", "Reading one prompt's blocks")
        self._finished = Counter(
            "cedar:request_success", "Completions that ended, by reason",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._by_source = Counter(
            "cedar:prompt_tokens_by_source", "Prompt tokens by where their rows came from",
            ["model_name", "source"], registry=self.registry,
        )  # fmt: skip
        self._cached_by_source = Counter(
            "cedar:prompt_tokens_cached_by_source", "Prompt tokens taken from a cache, by tier",
            ["model_name", "source"], registry=self.registry,
        )  # fmt: skip
        self._refused = Counter(
            "cedar:requests_refused", "Requests refused, by HTTP status",
            ["model_name", "status"], registry=self.registry,
        )  # fmt: skip
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token")
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time per token")
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end")
        self._queue = histogram("request_queue_time_seconds", "Arrival to first step")
        self._prefill = histogram("request_prefill_time_seconds", "First step to first token")
        self._decode = histogram("request_decode_time_seconds", "First token to end")
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens", _TOKENS)
        self._output_size = histogram("request_generation_tokens", "Tokens generated", _TOKENS)
        self._iteration = histogram("iteration_tokens_total", "New tokens per step", _TOKENS)
        self._tokens = TokenMetrics(model_name, _SECONDS)
        self.token = self._tokens.add  # called once per token and stream
        self.registry.register(self._tokens)
        self.registry.register(_EngineCollector(engine, model_name))

    def step(self, num_outputs: int) -> None:
        """The engine has run a step."""
        if num_outputs:
            self._iteration.observe(num_outputs)

    def first_token(self, request: Request) -> None:
        """A completion has its first token."""
        size, cached, disk = (
            len(request.prompt_ids), request.cached_tokens, request.cached_from_disk
        )  # fmt: skip
        memory = cached - disk
        self._prompt.inc(size)
        self._queries.inc(size)
        self._hits.inc(memory)
        by_source = {"local_compute": size - cached, "local_cache_hit": memory}
        by_tier = {"device": memory}
        if self._has_disk:
            self._disk_queries.inc(size - memory)
            self._disk_hits.inc(disk)
            if request.disk_tokens:
                self._disk_read.observe(request.disk_seconds)
            by_source["external_kv_transfer"] = by_tier["disk"] = disk
        for source, tokens in by_source.items():
            self._by_source.labels(self._model, source).inc(tokens)
        for source, tokens in by_tier.items():
            self._cached_by_source.labels(self._model, source).inc(tokens)
        if request.first_token is not None and request.started is not None:
            self._ttft.observe(request.first_token - request.arrival)
            self._queue.observe(request.started - request.arrival)
            self._prefill.observe(request.first_token - request.started)

    def finished(self, request: Request, reason: str, num_tokens: int) -> None:
        """A completion has ended."""
        now = time.monotonic()
        self._finished.labels(self._model, reason).inc()
        if reason == "abort":
            return
        self._e2e.observe(now - request.arrival)
        self._prompt_size.observe(len(request.prompt_ids))
        self._output_size.observe(num_tokens)
        if request.first_token is not None:
            self._decode.observe(now - request.first_token)
            if num_tokens > 1:
                self._tpot.observe((now - request.first_token) / (num_tokens - 1))

    def refused(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return bytes(generate_latest(self.registry))


class _EngineCollector(Collector):
    """Reads at every scrape what the engine has told last."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._label = engine, [model_name]

    def collect(self) -> Iterable[Metric]:
        """Gauges of now and counters of work so far."""
        snapshot, details = self._engine.snapshot(), self._engine.details()
        used = 1 - snapshot.free_blocks / max(1, snapshot.total_blocks)
        yield self._gauge("num_requests_running", "Requests in the batch", snapshot.running)
        yield self._gauge("num_requests_waiting", "Requests waiting", snapshot.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used)
        counter = self._counter
        yield counter("num_preemptions", "Requests that lost their blocks", snapshot.preemptions)
        yield counter("encode_tokens", "Tokens through the encoder", details.encode_tokens)
        yield counter("replay_tokens", "Prompt rows through the decoder", details.replay_tokens)
        yield counter("decode_tokens", "Tokens fed one by one", details.decode_tokens)
        evicted = details.pool.evicted
        yield counter("prefix_cache_evicted_blocks", "Cached blocks overwritten", evicted)
        kept = details.window_bytes
        yield self._gauge("prefix_cache_window_bytes", "Windows kept beside the blocks", kept)
        if details.disk is not None:
            yield from self._disk(details.disk)

    def _disk(self, disk: DiskStats) -> Iterable[Metric]:
        """The prefix store on disk."""
        for name, text, value in (
            ("bytes", "Bytes of all files", disk.bytes_on_disk),
            ("limit_bytes", "Most they may take", disk.limit_bytes),
            ("records", "Records that can be read", disk.records),
            (
                "records_set_aside",
                "Bad records that wait to be overwritten",
                disk.records_set_aside,
            ),
        ):
            yield self._gauge(f"prefix_store_{name}", text, value)
        for name, text, value in (
            ("lookups", "Requests whose prompt went on beyond memory", disk.lookups),
            ("hits", "Of those, the ones that got a block", disk.hits),
            ("read_bytes", "Payload bytes read", disk.read_bytes),
            ("written_bytes", "Payload bytes written", disk.written_bytes),
            ("written_records", "Records written", disk.written),
            ("evicted_records", "Records that made room", disk.evicted),
        ):
            yield self._counter(f"prefix_store_{name}", text, value)
        for name, text, reasons in (
            ("dropped_records", "Records that were not written", disk.dropped),
            ("missed_records", "Reads that gave nothing", disk.misses),
            ("damaged_records", "Records set aside", disk.damaged),
            ("errors", "Calls that failed", disk.errors),
        ):
            family = CounterMetricFamily(
                f"cedar:prefix_store_{name}", text, labels=["model_name", "reason"]
            )
            for reason, count in reasons.items():
                family.add_metric([*self._label, reason], count)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily, name, text, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily, name, text, value)

    def _filled(self, family: Callable[..., Metric], name: str, text: str, value: float) -> Metric:
        metric = family(f"cedar:{name}", text, labels=["model_name"])
        metric.add_metric(self._label, value)  # type: ignore[attr-defined]
        return metric
