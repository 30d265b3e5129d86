"""The server against the offline engine: what HTTP, text and JSON cost, in one run.

A is a server on loopback with `streams` clients, B the offline API on the server's own engine, with
the same prompts and parameters; they are timed turn by turn. Two engines would not do: where their
memory lies alone makes one a few percent slower. The offline call has every prompt at once, so the
server's engine is held until every request has come: both run the same batches. What reading the
requests takes counts, in seconds and in processor seconds. The clients live in a process of their own
and read raw bytes: they are not in the processor seconds, but where they share a core with the server
they are in the seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from cedar.bench.measure import Ratio, alternate, check_rounds, ratio_of
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.sampling_params import SamplingParams
from cedar.llm import LLM
from cedar.server.config import ServerConfig
from cedar.server.launch import CedarServer, bind
from cedar.server.service import Service
from cedar.text.tokenizer import Tokenizer

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class ServingResult:
    """Server and offline engine on the same work.

    Attributes:
        ratio: a = server, b = offline; `overhead` is their quotient less one.
        cpu: the same in processor seconds of this process: what the server does, without the
            clients and without whatever else runs on the machine.
        ttft, gaps: seconds to the first chunk, and between chunks, of every stream of all rounds.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    ratio: Ratio
    cpu: Ratio
    ttft: list[float]
    gaps: list[float]

    @property
    def overhead(self) -> float:
        """Share of time that serving adds to the offline run."""
        return 1 / self.ratio.speedup - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "streams": self.streams, "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens, "overhead": self.overhead,
            "overhead_quartiles": [1 / self.ratio.high - 1, 1 / self.ratio.low - 1],
            "cpu_overhead": 1 / self.cpu.speedup - 1,
            "cpu_overhead_quartiles": [1 / self.cpu.high - 1, 1 / self.cpu.low - 1],
            "server_seconds": self.ratio.a_seconds, "offline_seconds": self.ratio.b_seconds,
            "rounds": self.ratio.rounds, "ttft_seconds": percentiles(self.ttft),
            "inter_token_seconds": percentiles(self.gaps),
        }  # fmt: skip


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def run_serving(
    model: LoadedModel, tokenizer: Tokenizer, *, streams: int, prompt_tokens: int,
    output_tokens: int, rounds: int,
) -> ServingResult:  # fmt: skip
    """Measure one model."""
    check_rounds(rounds)
    size = tokenizer.vocab_size
    first = max(tokenizer.control_ids, default=0) + 1
    prompts = [
        [first + (31 * i + 7 * j) % (size - first) for j in range(prompt_tokens)]
        for i in range(streams)
    ]
    limits: dict[str, Any] = {
        "max_num_seqs": streams, "max_model_len": prompt_tokens + output_tokens,
    }  # fmt: skip
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    config = ServerConfig(served_model_names=("bench",), host=_HOST, port=0)
    llm = LLM(model, tokenizer=tokenizer, **limits)
    service = Service(llm, config)
    bound, ready = bind(config), threading.Event()
    server = CedarServer(service, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    ready.wait()
    bodies = [
        json.dumps({"prompt": prompt, "max_tokens": output_tokens, "temperature": 0,
                    "ignore_eos": True, "stream": True}).encode()
        for prompt in prompts
    ]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    clients = context.Process(target=_clients, args=(there, bound.getsockname()[1], bodies))
    clients.start()
    ttft: list[float] = []
    gaps: list[float] = []

    def serve() -> _Seconds:
        clock = _Clock()
        _hold_until_waiting(service, streams)
        here.send(True)
        for start, times in here.recv():
            ttft.append(times[0] - start)
            gaps.extend(b - a for a, b in itertools.pairwise(times))
        return clock.seconds()

    def run_offline() -> _Seconds:
        with _engine_to_itself(service):
            clock = _Clock()
            llm.generate(prompts, params)
            return clock.seconds()

    try:
        serve()
        run_offline()
        ttft.clear()
        gaps.clear()
        server_turns, offline_turns = alternate(serve, run_offline, rounds=rounds)
    finally:
        here.send(False)
        clients.join()
        server.should_exit = True
        thread.join()
    wall = ratio_of([t.wall for t in server_turns], [t.wall for t in offline_turns])
    cpu = ratio_of([t.processor for t in server_turns], [t.processor for t in offline_turns])
    return ServingResult(streams, prompt_tokens, output_tokens, wall, cpu, ttft, gaps)


class _Seconds(NamedTuple):
    """Of one turn: on the wall, and of all processors in this process."""

    wall: float
    processor: float


class _Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._begin = _Seconds(time.perf_counter(), time.process_time())

    def seconds(self) -> _Seconds:
        return _Seconds(
            time.perf_counter() - self._begin.wall, time.process_time() - self._begin.processor
        )


@contextmanager
def _engine_to_itself(service: Service) -> Iterator[None]:
    """The server's thread leaves its engine alone inside."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait()

    service.engine.tell(hold)
    held.wait()
    try:
        yield
    finally:
        release.set()


def _hold_until_waiting(service: Service, streams: int) -> None:
    """Let the engine start when so many requests wait for it."""

    def hold() -> None:
        while service.engine.snapshot().waiting < streams:
            time.sleep(_POLL_SECONDS)

    service.engine.tell(hold)


def _clients(pipe: Any, port: int, bodies: list[bytes]) -> None:
    """Process of the clients: one round of streams per message."""
    while pipe.recv():
        pipe.send(asyncio.run(_round(port, bodies)))


async def _round(port: int, bodies: list[bytes]) -> list[tuple[float, list[float]]]:
    return list(await asyncio.gather(*(_stream(port, body) for body in bodies)))


async def _stream(port: int, body: bytes) -> tuple[float, list[float]]:
    """Start of one stream, and when each of its text chunks came."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    times: list[float] = []
    start = time.perf_counter()
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: _Reader(times, done), _HOST, port
    )
    transport.write(head.encode() + body)
    await done
    return start, times


class _Reader(asyncio.Protocol):
    """Notes when events come; looks at nothing else."""

    def __init__(self, times: list[float], done: asyncio.Future[None]) -> None:
        self._times, self._done = times, done

    def data_received(self, data: bytes) -> None:
        """Every event of one read came at one moment."""
        now = time.perf_counter()
        self._times += [now] * data.count(b'data: {"id"')

    def connection_lost(self, error: Exception | None) -> None:
        """The stream has ended."""
        if not self._done.done():
            self._done.set_result(None)
