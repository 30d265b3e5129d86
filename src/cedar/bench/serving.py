"""The server against the offline engine: what HTTP, text and JSON cost, in one run.

A is a server on loopback with `streams` clients, B the offline API on the server's own engine, with
the same prompts and parameters; they are timed turn by turn. Two engines would not do: where their
memory lies alone makes one a few percent slower. The offline call has every prompt at once, so the
server's engine is held until every request has come: both run the same batches. What reading the
requests takes counts, in seconds and in processor seconds; the latter are those of the server's two
processes. The clients live in a process of their own and read raw bytes: they are not in the processor
seconds, but where they share a core with the server they are in the seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from cedar.bench.measure import Ratio, alternate, check_rounds, ratio_of
from cedar.engine.engine_loop import EngineLoop
from cedar.engine.host import EngineHost
from cedar.engine.sampling_params import SamplingParams
from cedar.llm import LLM
from cedar.server.config import ServerConfig
from cedar.server.engine_wire import EngineSpec
from cedar.server.launch import CedarServer, bind, build_service
from cedar.server.process_host import ProcessHost
from cedar.server.service import Service
from cedar.text.tokenizer import Tokenizer

T = TypeVar("T")

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class ServingResult:
    """Server and offline engine on the same work.

    Attributes:
        ratio: a = server, b = offline; `overhead` is their quotient less one.
        cpu: the same in processor seconds of the server: what it does, without the
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
    model: str, *, streams: int, prompt_tokens: int, output_tokens: int, rounds: int,
    start_host: Callable[[EngineSpec], EngineHost] = ProcessHost,
) -> ServingResult:  # fmt: skip
    """Measure one model.

    Args:
        model: a directory or `nano`; it needs a tokenizer.
        start_host: where the engine runs; a server's is a process.
    """
    check_rounds(rounds)
    limits = {"max_num_seqs": streams, "max_model_len": prompt_tokens + output_tokens}
    config = ServerConfig(served_model_names=("bench",), host=_HOST, port=0)
    service = build_service(EngineSpec(model, limits), config, start_host=start_host)
    tokenizer = service.tokenizer
    assert tokenizer is not None
    prompts = _prompts(tokenizer, streams, prompt_tokens)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    bodies = [
        json.dumps({"prompt": prompt, "max_tokens": output_tokens, "temperature": 0,
                    "ignore_eos": True, "stream": True}).encode()
        for prompt in prompts
    ]  # fmt: skip
    ttft: list[float] = []
    gaps: list[float] = []

    with _running(service, config) as (server, port), _clients(port, bodies) as clients:

        def serve() -> _Seconds:
            held, mine, begin = (
                server.on_engine(partial(hold_until_queued, streams)),
                _spent(),
                time.perf_counter(),
            )
            clients.send(True)
            for start, times in clients.recv():
                ttft.append(times[0] - start)
                gaps.extend(b - a for a, b in itertools.pairwise(times))
            wall = time.perf_counter() - begin
            before, after = (
                {**mine, **held.result()},
                {**_spent(), **server.on_engine(_spent).result()},
            )
            return _Seconds(wall, sum(after[pid] - before[pid] for pid in before))

        def run_offline() -> _Seconds:
            work = partial(_generate, tokenizer, prompts, params)
            return server.on_engine(work).result()

        serve()
        run_offline()
        ttft.clear()
        gaps.clear()
        server_turns, offline_turns = alternate(serve, run_offline, rounds=rounds)
    wall = ratio_of([t.wall for t in server_turns], [t.wall for t in offline_turns])
    cpu = ratio_of([t.processor for t in server_turns], [t.processor for t in offline_turns])
    return ServingResult(streams, prompt_tokens, output_tokens, wall, cpu, ttft, gaps)


class _Seconds(NamedTuple):
    """Of one turn: on the wall, and of all processors in the server's processes."""

    wall: float
    processor: float


class _Server(NamedTuple):
    """A server that runs."""

    service: Service
    loop: asyncio.AbstractEventLoop

    def on_engine(self, work: Callable[[EngineLoop], T]) -> Future[T]:
        """Run a function between two steps of the engine."""
        return asyncio.run_coroutine_threadsafe(self.service.engine.call(work), self.loop)


@contextmanager
def _running(service: Service, config: ServerConfig) -> Iterator[tuple[_Server, int]]:
    """The server on a thread, and its port."""
    bound, ready = bind(config), threading.Event()
    server = CedarServer(service, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    ready.wait()
    assert server.loop is not None
    try:
        yield _Server(service, server.loop), bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def _clients(port: int, bodies: list[bytes]) -> Iterator[Connection]:
    """The clients' process: send True for a round of streams and receive their times."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_client_process, args=(there, port, bodies))
    process.start()
    there.close()  # so that a client process that dies is an end of file here
    try:
        yield here
    finally:
        here.close()
        process.join()


def _prompts(tokenizer: Tokenizer, streams: int, length: int) -> list[list[int]]:
    size = tokenizer.vocab_size
    first = max(tokenizer.control_ids, default=0) + 1
    return [
        [first + (31 * i + 7 * j) % (size - first) for j in range(length)] for i in range(streams)
    ]


def _spent(loop: EngineLoop | None = None) -> dict[int, float]:
    """Processor seconds of this process so far, by its number."""
    return {os.getpid(): time.process_time()}


def hold_until_queued(streams: int, loop: EngineLoop) -> dict[int, float]:
    """Let the engine start when so many requests wait for it; `_spent` at the beginning."""
    spent = _spent()
    while loop.queued < streams:
        time.sleep(_POLL_SECONDS)
    return spent


def _generate(
    tokenizer: Tokenizer, prompts: list[list[int]], params: SamplingParams, loop: EngineLoop
) -> _Seconds:
    """The same work by the offline API on the server's engine."""
    llm = LLM.over(loop.engine, tokenizer)
    begin, spent = time.perf_counter(), time.process_time()
    llm.generate(prompts, params)
    return _Seconds(time.perf_counter() - begin, time.process_time() - spent)


def _client_process(pipe: Connection, port: int, bodies: list[bytes]) -> None:
    """One round of streams per message, until the pipe closes."""
    with asyncio.Runner() as runner:
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            pipe.send(runner.run(_round(port, bodies)))


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
