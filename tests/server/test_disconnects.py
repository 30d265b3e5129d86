"""A client that leaves, at whatever moment, costs exactly one abort and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from server_api import Api

HEADERS = [(b"content-type", b"application/json")]


async def leave(
    api: Api, path: str, body: dict[str, Any], after: int | float | asyncio.Event
) -> int:
    """Send a request and leave after so many body chunks (int) or seconds (float), or at an event.

    Returns the number of chunks that came.
    """
    raw = json.dumps(body).encode()
    gone = after if isinstance(after, asyncio.Event) else asyncio.Event()
    requests, chunks = [{"type": "http.request", "body": raw, "more_body": False}], 0

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal chunks
        if message["type"] == "http.response.body" and message.get("body"):
            chunks += 1
            if isinstance(after, int) and chunks >= after:
                gone.set()

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
             "query_string": b"", "headers": HEADERS, "http_version": "1.1", "scheme": "http",
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": ""}  # fmt: skip
    if isinstance(after, float):
        asyncio.get_running_loop().call_later(after, gone.set)
    await api.app(scope, receive, send)  # type: ignore[arg-type]
    return chunks


def test_two_hundred_clients_leave_in_every_phase_and_each_costs_one_abort(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, aborts = api.engine, []
    original = engine.abort

    def abort(request_id: str) -> None:
        aborts.append(request_id)
        original(request_id)

    monkeypatch.setattr(engine, "abort", abort)
    api.settle()
    assert api.used_blocks == 0
    rng = random.Random(0)

    async def run() -> None:
        for _ in range(25):
            jobs = []
            for _ in range(8):
                stream = rng.random() < 0.7
                body = {"prompt": [rng.randrange(20, 280) for _ in range(rng.randrange(1, 60))],
                        "max_tokens": 30, "ignore_eos": True, "stream": stream}  # fmt: skip
                moment = rng.choice([0.0, 0.001, 0.02, 0.05]) if not stream else rng.choice(
                    [0.0, 0.001, 0.02, 1, 2, 3])  # fmt: skip
                jobs.append(leave(api, "/v1/completions", body, moment))
            await asyncio.gather(*jobs)

    asyncio.run(run())
    api.settle()
    assert len(aborts) == len(set(aborts)) == 200
    snapshot = api.service.engine.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)
    assert api.used_blocks == 0
    assert not api.service.active and not api.service.engine._streams
    engine.pool.check_integrity()
    assert not engine.runner._generators


def test_a_client_that_leaves_after_two_chunks_frees_its_blocks_within_three_steps(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps = api.engine, []
    original = engine.step

    def step() -> Any:
        steps.append(1)
        return original()

    monkeypatch.setattr(engine, "step", step)
    body = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip

    async def run() -> int:
        chunks = await leave(api, "/v1/completions", body, 2)
        before = len(steps)
        await api.service.engine.call(lambda _: None)
        return chunks * 0 + len(steps) - before

    assert asyncio.run(run()) <= 3
    assert api.used_blocks == 0


def test_all_completions_of_a_call_end_when_its_client_leaves(api: Api) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 60, "ignore_eos": True, "stream": True}
    asyncio.run(leave(api, "/v1/completions", body, 1))
    api.settle()
    assert api.used_blocks == 0 and not api.engine.has_work
