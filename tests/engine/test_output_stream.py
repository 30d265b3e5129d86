"""An output stream wakes its consumer for tokens and for silence, at the cost of one timer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from cedar.engine.output import StepOutput
from cedar.engine.output_stream import OutputStream
from cedar.engine.request import Request
from cedar.engine.sampling_params import SamplingParams


def opened() -> tuple[OutputStream, StepOutput]:
    request = Request("a", (1,), SamplingParams(max_tokens=100))
    return OutputStream([request], lambda name: None), StepOutput(request, 5)


def test_silence_is_counted_from_the_last_token_and_noticed_every_time() -> None:
    async def run() -> tuple[list[int], list[float]]:
        stream, output = opened()
        begin = stream.loop.time()
        stream.loop.call_later(0.06, stream.put, [output])
        counts, moments = [], []
        for _ in range(3):
            counts.append(len(await stream.next(0.1)))
            moments.append(stream.loop.time() - begin)
        return counts, moments

    counts, moments = asyncio.run(run())
    assert counts == [1, 0, 0]
    assert moments[1] >= 0.155 and moments[2] - moments[1] >= 0.095
    assert moments[2] < 1.0


def test_a_shorter_wait_after_a_longer_one_ends_in_time() -> None:
    async def run() -> None:
        stream, output = opened()
        stream.loop.call_soon(stream.put, [output])
        assert await stream.next(60.0) == [output]
        assert await asyncio.wait_for(stream.next(0.02), 10) == []

    asyncio.run(run())


def test_a_wait_without_a_limit_outlasts_an_older_limit() -> None:
    async def run() -> None:
        stream, output = opened()
        assert await stream.next(0.01) == []
        stream.loop.call_soon(stream.put, [output])
        assert await stream.next(0.05) == [output]
        stream.loop.call_later(0.15, stream.put, [output])
        assert await stream.next() == [output]

    asyncio.run(run())


def test_a_hundred_tokens_set_one_timer_and_a_closed_stream_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> int:
        stream, output = opened()
        loop, made = stream.loop, []
        original = loop.call_at

        def call_at(*arguments: Any, **more: Any) -> Any:
            made.append(original(*arguments, **more))
            return made[-1]

        monkeypatch.setattr(loop, "call_at", call_at)
        for _ in range(100):
            loop.call_soon(stream.put, [output])
            assert await stream.next(30.0) == [output]
        stream.close()
        assert all(timer.cancelled() for timer in made)
        kept = weakref.ref(stream)
        count = len(made)
        del stream
        gc.collect()
        assert kept() is None
        return count

    assert asyncio.run(run()) == 1
