"""Event streams, and what happens when a client leaves. No OpenAI fields here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cedar.server.errors import problem_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
#: A comment: clients skip it, proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(document: Any) -> bytes:
    """One event with a JSON document."""
    return b"data: " + _encoder.encode(document) + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields, until it ends or the client leaves.

    An error after the start becomes an event with an error object, and the stream closes.

    Args:
        events: yields whole events.
        close: called once, however the stream ends, even if it never starts.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream."""
        try:
            await _first_of(self._send_all(send), receive)
        except ClientDisconnect:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            try:
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:  # the border: headers are out, so it can only be an event
                await _send_body(send, event(problem_of(error).body), more=True)
        finally:
            await self._events.aclose()
        await _send_body(send, b"", more=False)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client leaves.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientDisconnect: the client has left.
    """
    return await _first_of(work, receive)


async def _first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
