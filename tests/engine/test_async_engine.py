"""The asynchronous engine streams what the engine computes and forgets clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cedar import LLM, SamplingParams
from cedar.config.engine_config import EngineConfig
from cedar.engine.async_engine import AsyncEngine
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.thread_host import ThreadHost
from cedar.errors import DoesNotFitError, EngineDeadError, QueueFullError
from cedar.loading import load

PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
CONFIG = EngineConfig(max_model_len=64, max_num_seqs=2, block_size=8)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("preset:tiny", dtype="float32")


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[AsyncEngine]:
    running = AsyncEngine(ThreadHost(Engine(model, CONFIG)), max_waiting=3)
    running.start()
    yield running
    running.stop()


async def collect(engine: AsyncEngine, name: str, ids: list[int]) -> list[int]:
    return [out.token_id async for out in engine.generate(name, ids, PARAMS)]


def test_streams_of_concurrent_clients_equal_the_offline_result(
    engine: AsyncEngine, model: LoadedModel
) -> None:
    prompts = [[5, 6, 7], [9] * 20, [11, 3]]

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(collect(engine, f"r{i}", p) for i, p in enumerate(prompts)))

    offline = LLM(model, max_model_len=64, max_num_seqs=1, block_size=8)
    expected = [offline.generate([p], PARAMS)[0].outputs[0].token_ids for p in prompts]
    assert asyncio.run(run()) == expected


def test_a_client_that_leaves_gives_its_blocks_back_with_one_abort(engine: AsyncEngine) -> None:
    aborts = []
    original = engine.host.engine.abort
    engine.host.engine.abort = lambda name: (aborts.append(name), original(name))[1]  # type: ignore[method-assign]

    async def run() -> None:
        stream = engine.generate("gone", [5] * 20, PARAMS)
        async for _ in stream:
            break
        await stream.aclose()
        await engine.call(lambda _: None)

    asyncio.run(run())
    assert aborts == ["gone"]
    assert engine.snapshot().free_blocks == engine.snapshot().total_blocks


def test_what_can_never_run_is_refused_before_the_first_output(engine: AsyncEngine) -> None:
    with pytest.raises(DoesNotFitError, match="max_model_len 64"):
        asyncio.run(collect(engine, "big", [5] * 60))


def test_more_waiting_requests_than_allowed_are_refused(model: LoadedModel) -> None:
    idle = AsyncEngine(
        ThreadHost(Engine(model, CONFIG)), max_waiting=1
    )  # never started: nothing is taken

    async def run() -> None:
        # Two slots are free: two of them will not wait.
        accepted = [asyncio.create_task(collect(idle, name, [5])) for name in "abc"]
        await asyncio.sleep(0)
        assert not any(task.done() for task in accepted)
        with pytest.raises(QueueFullError, match="1 requests are waiting, the limit is 1"):
            await collect(idle, "d", [5])
        for task in accepted:
            task.cancel()

    asyncio.run(run())


def test_a_call_that_cannot_be_sent_leaves_nothing_behind(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise TypeError("cannot be pickled")

    monkeypatch.setattr(engine.host, "put", refuse)
    with pytest.raises(TypeError, match="cannot be pickled"):
        asyncio.run(engine.call(lambda _: 7))
    assert not engine._calls


def test_a_dying_engine_tells_every_client_and_refuses_new_ones(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def explode() -> None:
        raise RuntimeError("boom")

    engine.host.engine.step = explode  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineDeadError, match="boom"):
        asyncio.run(collect(engine, "a", [5]))
    with pytest.raises(EngineDeadError, match="restart the server"):
        asyncio.run(collect(engine, "b", [5]))
    assert "engine died" in caplog.text


def test_what_work_raises_goes_to_its_caller_and_the_engine_lives_on(engine: AsyncEngine) -> None:
    def explode(_: object) -> None:
        raise ValueError("boom")

    async def run() -> object:
        with pytest.raises(ValueError, match="boom"):
            await engine.call(explode)
        return await engine.call(lambda _: 7)

    assert asyncio.run(run()) == 7
    assert len(asyncio.run(collect(engine, "a", [5]))) == PARAMS.max_tokens


def test_calls_that_the_engine_cannot_run_any_more_are_refused(engine: AsyncEngine) -> None:
    async def run() -> None:
        entered, leave = threading.Event(), threading.Event()

        def block(_: object) -> None:
            entered.set()
            leave.wait(10)
            raise KeyboardInterrupt  # ends the engine thread with the next call still queued

        blocked = asyncio.create_task(engine.call(block))
        await asyncio.to_thread(entered.wait, 10)
        queued = asyncio.create_task(engine.call(lambda _: 7))
        await asyncio.sleep(0)
        leave.set()
        with pytest.raises(EngineDeadError, match="the engine has stopped; restart the server"):
            await asyncio.wait_for(queued, 10)
        with pytest.raises(EngineDeadError, match="the engine has stopped; restart the server"):
            await asyncio.wait_for(engine.call(lambda _: 7), 10)
        with pytest.raises(EngineDeadError):
            await blocked

    asyncio.run(run())


def test_stopping_ends_running_requests_as_aborted(engine: AsyncEngine) -> None:
    async def run() -> list[str | None]:
        reasons = []
        async for out in engine.generate("a", [5], SamplingParams(max_tokens=60, temperature=0,
                                                                  ignore_eos=True)):  # fmt: skip
            reasons.append(out.finish_reason and out.finish_reason.value)
            if len(reasons) == 2:
                await asyncio.get_running_loop().run_in_executor(None, engine.stop)
        return reasons

    reasons = asyncio.run(run())
    assert reasons[-1] in ("abort", "length")
