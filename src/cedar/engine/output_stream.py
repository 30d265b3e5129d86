"""`OutputStream`: tokens of one client's completions, from the engine's host to an asyncio consumer.

Made by `async_engine.py`; read by the server. A step's outputs arrive together and are taken
together, so that a consumer that falls behind catches up in one go. Every token passes here on its
way to a client, so waiting makes one future and no timer: see `_expire`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cedar.engine.output import StepOutput
from cedar.engine.request import Request

Item = StepOutput | BaseException


class OutputStream:
    """Outputs of the completions that one client asked for.

    Only its asyncio loop may use it; whoever receives events hands items over through that loop.

    Args:
        requests: the completions.
        end: called once for every completion that is ended before it has finished.

    Attributes:
        loop: the consumer's loop.   requests: every completion, by request id.
        open_ids: completions that have not ended.
    """

    def __init__(self, requests: Sequence[Request], end: Callable[[str], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests = {request.request_id: request for request in requests}
        self.open_ids = set(self.requests)
        self._end = end
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, items: Sequence[Item]) -> None:
        """Take items; runs on the loop."""
        self._items += items
        self._wake()

    async def next(self, timeout: float | None = None) -> list[StepOutput]:
        """Every output that has come since the last call; waits for at least one.

        Outputs of completions that were ended meanwhile are left out.

        Args:
            timeout: seconds; the result is empty when they have passed.

        Raises:
            EngineDeadError and others: what ended the engine or refused a request.
        """
        while True:
            if not self._items:
                await self._wait(timeout)
            if not self._items:
                return []
            items, self._items = self._items, []
            outputs = self._accept(items)
            if outputs:
                return outputs

    def end(self, request_id: str) -> None:
        """End one completion now; nothing happens if it has ended already."""
        if request_id in self.open_ids:
            self.open_ids.discard(request_id)
            self._end(request_id)

    def close(self) -> None:
        """End every completion that is still open."""
        for request_id in sorted(self.open_ids):
            self.end(request_id)
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, timeout: float | None) -> None:
        """Until items have come or `timeout` seconds have passed."""
        self._deadline = None if timeout is None else self.loop.time() + timeout
        if self._deadline is not None:
            self._look_at(self._deadline)
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_at(self, moment: float) -> None:
        """Have the timer fire at `moment` or before."""
        if self._timer is not None:
            if self._timer.when() <= moment:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(moment, self._expire)

    def _expire(self) -> None:
        """The timer has fired: wake the consumer if it is due, else look again when it will be.

        A wait only moves the deadline; the timer is set once per timeout, not once per token.
        """
        self._timer = None
        if self._deadline is None or self._waiter is None:
            return
        if self.loop.time() >= self._deadline:
            self._wake()
        else:
            self._look_at(self._deadline)

    def _accept(self, items: Sequence[Item]) -> list[StepOutput]:
        outputs = []
        for item in items:
            if isinstance(item, BaseException):
                self.open_ids.clear()
                raise item
            name = item.request.request_id
            if name not in self.open_ids:
                continue
            if item.finish_reason is not None:
                self.open_ids.discard(name)
            outputs.append(item)
        return outputs
