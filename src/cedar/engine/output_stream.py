"""`OutputStream`: tokens of one client's completions, from the engine thread to an asyncio consumer.

Made by `async_engine.py`; read by the server. A step's outputs arrive together and are taken
together, so that a consumer that falls behind catches up in one go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cedar.engine.engine import StepOutput
from cedar.engine.request import Request

Item = StepOutput | BaseException


class OutputStream:
    """Outputs of the completions that one client asked for.

    Only its asyncio loop may use it; the engine thread hands items over through that loop.

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
        self._arrived = asyncio.Event()

    def put(self, items: Sequence[Item]) -> None:
        """Take items; runs on the loop."""
        self._items += items
        self._arrived.set()

    async def next(self, timeout: float | None = None) -> list[StepOutput]:
        """Every output that has come since the last call; waits for at least one.

        Outputs of completions that were ended meanwhile are left out.

        Args:
            timeout: seconds; the result is empty when they have passed.

        Raises:
            EngineDeadError and others: what ended the engine or refused a request.
        """
        while True:
            if not self._items and not await self._wait(timeout):
                return []
            items, self._items = self._items, []
            self._arrived.clear()
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

    async def _wait(self, timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

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
