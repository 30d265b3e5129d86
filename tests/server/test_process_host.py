"""The engine in a process of its own: same answers, seen from outside, and neither outlives the other."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from operator import attrgetter, truediv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from server_api import ENGINE, on_a_thread

from cedar.bench.serving import hold_until_queued
from cedar.engine.async_engine import AsyncEngine
from cedar.engine.host import Abort, EngineHost
from cedar.engine.output import StepOutput
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import CheckpointError, EngineDeadError, UsageError
from cedar.server import engine_process
from cedar.server.engine_wire import EngineSpec, Unpacker, pack
from cedar.server.process_host import ProcessHost

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1)


def spec(directory: Path, **engine: Any) -> EngineSpec:
    return EngineSpec(str(directory), {**ENGINE, **engine}, dtype="float32")


@asynccontextmanager
async def started(host: EngineHost) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(host, max_waiting=4)
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def answers(engine: AsyncEngine) -> list[Any]:
    """What three clients see of their tokens and of how their prompts were read."""

    async def one(number: int) -> Any:
        prompt = [30 + number] * 20
        found = [out async for out in engine.generate(f"r{number}", prompt, PARAMS)]
        request = found[-1].request
        tokens = [(out.token_id, out.logprobs, out.finish_reason) for out in found]
        return tokens, request.prompt_logprobs, request.miss_reason, request.first_token is None

    return [await asyncio.gather(*(one(number) for number in range(3))), await one(0)]


def test_clients_see_the_same_as_with_the_engine_in_their_own_process(tiny_directory: Path) -> None:
    async def run(start: Callable[[EngineSpec], EngineHost]) -> list[Any]:
        async with started(start(spec(tiny_directory))) as engine:
            return await answers(engine)

    assert asyncio.run(run(ProcessHost)) == asyncio.run(run(on_a_thread))


def test_counts_and_details_follow_the_other_process(tiny_directory: Path) -> None:
    async def run() -> None:
        host = ProcessHost(spec(tiny_directory))
        async with started(host) as engine:
            stands = asyncio.create_task(engine.call(partial(hold_until_queued, 4)))
            clients = [engine.generate(f"w{i}", [40, 41, i + 1], PARAMS) for i in range(3)]
            firsts = [asyncio.create_task(anext(client)) for client in clients]
            await asyncio.sleep(0.05)
            assert engine.snapshot().waiting == 3  # sent, and not yet seen over there
            goes_on = asyncio.create_task(engine.call(attrgetter("queued")))
            assert list(await stands) == [host.pid] != [os.getpid()]
            assert await goes_on == 0
            await asyncio.gather(*firsts)
            assert engine.snapshot().waiting == 0
            for client in clients:
                await client.aclose()
            await engine.call(attrgetter("queued"))
            counts = engine.snapshot()
            assert (counts.running, counts.free_blocks) == (0, counts.total_blocks)
            assert engine.details().encode_tokens == 9 and not engine.details().requests
            with pytest.raises(TypeError, match="EngineLoop"):
                await engine.call(partial(truediv, 1))

    asyncio.run(run())


def test_a_killed_engine_process_ends_every_stream_and_is_reported(tiny_directory: Path) -> None:
    async def run() -> None:
        host = ProcessHost(spec(tiny_directory, max_model_len=4000))
        async with started(host) as engine:
            long = SamplingParams(max_tokens=3900, temperature=0, ignore_eos=True)
            seen: list[StepOutput] = []

            async def read() -> None:
                async for output in engine.generate("r", [40], long):
                    seen.append(output)
                    if len(seen) == 3:
                        os.kill(host.pid, signal.SIGKILL)

            with pytest.raises(EngineDeadError, match="ended with status -9"):
                await read()
            assert not engine.is_running
            assert "status -9" in str(engine.failure)
            with pytest.raises(EngineDeadError, match="restart the server"):
                await anext(engine.generate("s", [40], long))

    asyncio.run(run())


def test_a_command_larger_than_a_pipe_arrives_whole_from_the_loop_of_the_server(
    tiny_directory: Path,
) -> None:
    async def run() -> None:
        async with started(ProcessHost(spec(tiny_directory))) as engine:
            await engine.call(attrgetter("queued"))
            with pytest.raises(TypeError):
                await engine.call(partial(truediv, "x" * 1_000_000))
            assert await engine.call(attrgetter("queued")) == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_messages_are_whole_however_their_bytes_are_cut() -> None:
    sent = [{"a": b"x" * 1000}, [1, 2], "z"]
    stream = b"".join(pack(message) for message in sent)
    for size in (1, 7, 500, len(stream)):
        unpacker, got = Unpacker(), []
        for start in range(0, len(stream), size):
            got += unpacker.feed(stream[start : start + size])
        assert got == sent


def test_what_the_engine_process_refuses_at_its_start_is_raised_here(
    tiny_directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        ProcessHost(spec(tmp_path / "none"))
    with pytest.raises(UsageError, match="max_model_len=99999 exceeds"):
        ProcessHost(spec(tiny_directory, max_model_len=99999))
    with pytest.raises(OSError, match="File name too long"):
        ProcessHost(spec(Path("x" * 300)))


def test_a_process_that_does_not_start_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def refused() -> list[str]:
        with pytest.raises(CheckpointError):
            ProcessHost(spec(tmp_path / "none"))
        gc.collect()
        return sorted(os.listdir("/proc/self/fd"))

    assert refused() == refused()


def test_the_engine_process_finds_its_modules_where_the_server_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the module that was meant')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        ProcessHost(spec(tmp_path / "none"))


def test_a_ctrl_c_while_the_model_loads_ends_both_processes_without_a_traceback(
    tiny_directory: Path,
) -> None:
    command = [sys.executable, "-m", "cedar", "serve", str(tiny_directory), "--port", "0"]
    # The group is what a terminal sends Ctrl-C to.
    with subprocess.Popen(command, stderr=subprocess.PIPE, process_group=0) as server:
        group = os.getpgid(_engine_process_of(server))
        os.killpg(server.pid, signal.SIGINT)
        assert server.stderr is not None
        assert server.stderr.read().strip() == b""  # until both have closed it
    assert server.returncode == 130
    assert group != server.pid


def _engine_process_of(server: subprocess.Popen[bytes]) -> int:
    """Its number, as soon as it runs Python, which is long before it is ready."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    while server.poll() is None:
        for pid in children.read_text().split():
            if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        time.sleep(0.01)
    raise AssertionError("the server has ended")


def test_an_engine_process_says_nothing_when_only_its_events_cannot_be_sent_any_more(
    tiny_directory: Path,
) -> None:
    to_obey, commands = multiprocessing.Pipe(duplex=False)
    events, out = os.pipe()
    passed = (to_obey.fileno(), out)
    command = [sys.executable, "-m", "cedar.server.engine_process", *map(str, passed)]
    with subprocess.Popen(command, pass_fds=passed, stderr=subprocess.PIPE) as process:
        os.close(out)
        commands.send((spec(tiny_directory), logging.WARNING))
        assert os.read(events, 1)
        os.close(events)
        commands.send(Abort("unknown"))  # the counts that follow find nobody
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_nothing_is_told_once_the_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_TELL_SECONDS", 0.001)
    numbers, told, ended = itertools.count(), io.BytesIO(), threading.Event()
    engine: Any = SimpleNamespace(details=lambda: next(numbers), counts=lambda: None)
    outbox = engine_process.Outbox(told, engine)
    teller = threading.Thread(target=outbox.keep_telling, args=(ended,), daemon=True)
    teller.start()
    while not told.tell():
        assert teller.is_alive()
    ended.set()
    teller.join(10)
    assert not teller.is_alive()


def test_an_engine_process_ends_with_a_server_that_is_killed(tiny_directory: Path) -> None:
    program = (
        "import sys, time\n"
        "from cedar.server.engine_wire import EngineSpec\n"
        "from cedar.server.process_host import ProcessHost\n"
        "host = ProcessHost(EngineSpec(sys.argv[1], {'max_model_len': 64}))\n"
        "print(host.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tiny_directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stderr is not None
        assert int(server.stdout.readline()) != server.pid
        server.kill()
        # The engine process holds the other end of this pipe until it has ended.
        server.stderr.read()


def test_the_servers_own_process_never_imports_torch() -> None:
    program = "import sys, cedar.server.launch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
