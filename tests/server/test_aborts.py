"""A client that leaves in a given phase: blocks, slots and every object of its call are given back."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_api import Api
from test_disconnects import leave

from cedar.engine.output_stream import OutputStream
from cedar.engine.request import Request, RequestStatus
from cedar.server.service import Call

#: Two chunks of prefill at 64 tokens a step.
LONG = list(range(20, 100))
BODY: dict[str, Any] = {"prompt": [30, 31, 32], "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def one(serve: Callable[..., Api], tiny_directory: Path) -> Api:
    """Four requests run at most, as long as the engine's pool allows."""
    return serve(tiny_directory, {"max_model_len": 160})


def waiting(requests: list[Request]) -> bool:
    """Some of the call's completions have no slot."""
    return any(request.status is RequestStatus.WAITING for request in requests)


def prefill(requests: list[Request]) -> bool:
    """A prompt is half read."""
    return any(0 < request.read < len(request.prompt_ids) for request in requests)


def decode(requests: list[Request]) -> bool:
    """Every completion has tokens and wants more."""
    return all(len(request.output_ids) >= 2 for request in requests)


def first_token(requests: list[Request]) -> bool:
    """The prompt has been read in this very step."""
    return all(len(request.output_ids) == 1 for request in requests)


def living() -> list[Any]:
    """Objects of calls that something still holds."""
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), (Request, OutputStream, Call))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        (waiting, {"n": 6}),
        (waiting, {"prompt": LONG, "n": 5}),
        (prefill, {"prompt": LONG}),
        (prefill, {"prompt": [LONG, LONG[1:]]}),
        (first_token, {}),
        (decode, {}),
        (decode, {"n": 3, "seed": 1}),
        (decode, {"prompt": [[30], [31, 32]], "n": 2, "logprobs": 2}),
        (decode, {"echo": True, "logprobs": 1}),
    ],
    ids=["waiting behind its own n", "waiting behind long prompts", "prefill", "two prefills",
         "first token", "decode", "decode n", "decode prompts and n", "scored"],
)  # fmt: skip
def test_leaving_in_a_phase_gives_everything_back(
    one: Api, monkeypatch: pytest.MonkeyPatch, phase: Callable[[list[Request]], bool],
    fields: dict[str, Any], stream: bool,
) -> None:  # fmt: skip
    service, reached = one.service, []
    engine, loop_gone = one.engine, asyncio.Event()
    original = engine.step
    before = len(living())

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def step() -> Any:
            outputs = original()
            calls = list(service.active)
            if not reached and calls and phase(calls[0].requests):
                reached.append(phase)
                loop.call_soon_threadsafe(loop_gone.set)
                deadline = time.monotonic() + 30
                while service.active and time.monotonic() < deadline:
                    time.sleep(0.001)  # the client has left before the next step
            return outputs

        monkeypatch.setattr(engine, "step", step)
        salt = f"{phase} {fields} {stream}"  # so that no prompt is found in the prefix cache
        body = {**BODY, **fields, "stream": stream, "cache_salt": salt}
        await leave(one, "/v1/completions", body, loop_gone)

    asyncio.run(run())
    monkeypatch.undo()
    one.settle()
    assert reached == [phase]
    snapshot = service.engine.snapshot()
    assert (snapshot.running, snapshot.waiting, one.used_blocks) == (0, 0, 0)
    assert not service.active and not service.engine._streams and not engine.runner._generators
    assert not engine.has_work
    engine.pool.check_integrity()
    assert len(living()) == before
