"""`Api`: calls of a service in this process, without a socket. Used by the tests of this directory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from cedar.engine.engine import Engine
from cedar.engine.thread_host import ThreadHost
from cedar.server.app import create_app
from cedar.server.engine_wire import EngineSpec
from cedar.server.service import Service

MODEL_LEN = 96
ENGINE = {"max_model_len": MODEL_LEN, "max_num_seqs": 4, "block_size": 8,
          "max_num_batched_tokens": 64, "enable_prefix_caching": True}  # fmt: skip


def on_a_thread(spec: EngineSpec) -> ThreadHost:
    """An engine in this process, where a test can look at it; a real server's has its own."""
    return ThreadHost(spec.build().engine)


class Api:
    """Calls of a service in this process; each runs in an event loop of its own."""

    def __init__(self, service: Service) -> None:
        self.service, self.app = service, create_app(service)

    @property
    def engine(self) -> Engine:
        """The engine behind `on_a_thread`."""
        host = self.service.engine.host
        assert isinstance(host, ThreadHost)
        return host.engine

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request."""

        async def run() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def client(self) -> httpx.AsyncClient:
        """An asynchronous client."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://cedar",
                                 timeout=120)  # fmt: skip

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return self.call("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.call("POST", path, json=body, **options)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a streamed answer, its end checked."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in events[:-1]]

    def settle(self) -> None:
        """Wait until the engine has obeyed everything it was told."""
        asyncio.run(self.service.engine.call(lambda _: None))

    @property
    def used_blocks(self) -> int:
        """Blocks that are held by requests."""
        snapshot = self.service.engine.snapshot()
        return snapshot.total_blocks - snapshot.free_blocks
