"""`AsyncEngine`: requests from asyncio to an engine that runs elsewhere, and its tokens back.

Called by the server. The engine runs in an `EngineHost`, a thread or a process; here are the streams
of its clients. Requests are validated before they leave, so a refusal comes at once and before any
output.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from cedar.engine.engine_status import EngineCounts, EngineDetails
from cedar.engine.host import Abort, Answered, Call, EngineHost, Event, Refused, Stepped, Submit
from cedar.engine.output import StepOutput
from cedar.engine.output_stream import Item, OutputStream
from cedar.engine.request import Request
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

_STOPPED = "the engine has stopped; restart the server"


class AsyncEngine:
    """An engine as asyncio sees it.

    Args:
        host: where it runs; only this object gives it commands from now on.
        max_waiting: requests that may wait for a slot; more are refused with `QueueFullError`.
        on_step: called after every step with its outputs, where the host reports it (metrics).

    Attributes:
        info: what never changes.
    """

    def __init__(
        self,
        host: EngineHost,
        *,
        max_waiting: int = 256,
        on_step: Callable[[Sequence[StepOutput]], None] | None = None,
    ) -> None:
        self.host, self.info = host, host.info
        self._max_waiting, self._on_step = max_waiting, on_step
        self._streams: dict[str, OutputStream] = {}
        self._failure: BaseException | None = None
        self._submitted = 0
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._is_stopping = self._has_ended = False

    def start(self) -> None:
        """Start the engine."""
        self.host.start(self._receive)

    def stop(self) -> None:
        """Stop after the current step and wait for it; running requests are aborted.

        What is on its way to the prefix store is written, then the store is closed.
        """
        self._is_stopping = True
        self.host.stop()

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine; None while it is healthy."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether a request handed over now would be run."""
        return self.host.is_alive and self._failure is None and not self._is_stopping

    def snapshot(self) -> EngineCounts:
        """The latest counts there are, what is still on its way among the waiting ones."""
        counts = self.host.counts()
        return counts._replace(
            waiting=counts.waiting + self._submitted - counts.submitted, submitted=self._submitted
        )

    def waiting_with(self, more: int) -> int:
        """How many would wait if `more` requests were handed over now.

        Those on their way to an engine with free slots are not going to wait.
        """
        counts = self.host.counts()
        free = 0 if counts.waiting else self.info.config.max_num_seqs - counts.running
        on_their_way = self._submitted - counts.submitted
        return counts.waiting + max(0, on_their_way + more - free)

    def details(self) -> EngineDetails:
        """What metrics and the live view show."""
        return self.host.details()

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *,
        eos_token_id: int | None = None, index: int = 0, cache_salt: bytes = b"",
    ) -> AsyncIterator[StepOutput]:  # fmt: skip
        """Run one completion; closing the iterator early aborts it, once.

        Raises:
            QueueFullError: too many wait.   RequestError, DoesNotFitError: it can never run.
            EngineDeadError: the engine has died.
        """
        request = Request(request_id, tuple(prompt_ids), params, eos_token_id, index)
        request.cache_salt = cache_salt
        stream = self.open([request])
        try:
            while stream.open_ids:
                for output in await stream.next():
                    yield output
        finally:
            stream.close()

    def open(self, requests: Sequence[Request]) -> OutputStream:
        """Queue completions, all or none, and return their outputs. Call it on an asyncio loop.

        Closing the stream ends, once each, the completions that are still running.

        Raises:
            As `check`.
        """
        self.check(requests)
        stream = OutputStream(requests, self._end)
        for request in requests:
            self._streams[request.request_id] = stream
        self._submitted += len(requests)
        self.host.put(Submit(requests))
        if self._has_ended:  # between the check and now, and may not have seen this stream
            stream.close()
            raise EngineDeadError(_STOPPED)
        return stream

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse now what could never run, or what must not wait.

        Raises:
            QueueFullError: too many wait.   RequestError, DoesNotFitError: it can never run.
            EngineDeadError: the engine has died.
        """
        self._check_alive()
        for request in requests:
            if request.request_id in self._streams:
                raise RequestError(
                    f"request id {request.request_id!r} is already running", param="request_id"
                )
            self.info.limits.check(request)
        if len(requests) > self._max_waiting:
            raise RequestError(
                f"one call asks for {len(requests)} completions, the queue holds "
                f"{self._max_waiting}; ask for fewer", param="n",
            )  # fmt: skip
        if self.waiting_with(len(requests)) > self._max_waiting:
            raise QueueFullError(
                f"{self.waiting_with(0)} requests are waiting, the limit is {self._max_waiting}; try "
                "again later"
            )

    def _check_alive(self) -> None:
        if self._failure is not None or self._is_stopping:
            raise EngineDeadError(_STOPPED)

    async def call(self, work: Callable[[Any], Any]) -> Any:
        """Run a function between two steps and wait for its result; what it raises is raised here.

        Args:
            work: gets the `EngineLoop`; picklable where the engine is in another process.

        Raises:
            EngineDeadError: the engine has stopped, or stops before the function's turn.
        """
        self._check_alive()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.host.put(Call(number, work))
            if self._has_ended:  # between the check and now, and may not have seen this call
                raise EngineDeadError(_STOPPED)
            return await future
        finally:
            self._calls.pop(number, None)

    def _end(self, request_id: str) -> None:
        """End a completion whose client has left or has had enough."""
        self._streams.pop(request_id, None)
        self.host.put(Abort(request_id))

    def _receive(self, event: Event) -> None:
        """Take an event of the host, on whichever thread that is."""
        if isinstance(event, Stepped):
            self._deliver([(output.request.request_id, output) for output in event.outputs])
            if self._on_step is not None:
                self._on_step(event.outputs)
        elif isinstance(event, Refused):
            self._deliver([(event.request_id, event.error)])
        elif isinstance(event, Answered):
            self._answer(event)
        else:
            self._end_all(event.failure)

    def _deliver(self, items: Sequence[tuple[str, Item]]) -> None:
        """Hand items to their streams, with one wake-up per asyncio loop."""
        loops: dict[asyncio.AbstractEventLoop, dict[OutputStream, list[Item]]] = {}
        for name, item in items:
            stream = self._streams.get(name)
            if stream is not None:
                loops.setdefault(stream.loop, {}).setdefault(stream, []).append(item)
            if isinstance(item, BaseException) or item.finish_reason is not None:
                self._streams.pop(name, None)
        for loop, streams in loops.items():
            _on(loop, _hand_over, streams)

    def _answer(self, event: Answered) -> None:
        future = self._calls.pop(event.number, None)
        if future is not None:
            _on(future.get_loop(), _settle, future, event)

    def _end_all(self, failure: BaseException | None) -> None:
        """Tell every consumer that nothing more will come."""
        self._failure, self._has_ended = failure, True
        for number in list(self._calls):
            self._answer(Answered(number, error=EngineDeadError(_STOPPED)))
        reason = _STOPPED if failure is None else f"the engine has died: {failure}"
        self._deliver([(name, EngineDeadError(reason)) for name in list(self._streams)])


def _on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Run a function on a loop; at once where that is the loop we are on."""
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if is_here:
        function(*args)
        return
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        logger.debug("the loop of a client has closed")


def _hand_over(streams: dict[OutputStream, list[Item]]) -> None:
    for stream, items in streams.items():
        stream.put(items)


def _settle(future: asyncio.Future[Any], event: Answered) -> None:
    if future.done():
        return
    if event.error is None:
        future.set_result(event.value)
    else:
        future.set_exception(event.error)
