"""`AsyncEngine`: runs `Engine.step` on one thread and hands tokens to asyncio consumers.

Called by the server. The engine thread owns the engine; other threads only put commands in a queue.
Requests are validated before they are queued, so a refusal comes at once and before any output.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from cedar.engine.engine import Engine, StepOutput
from cedar.engine.output_stream import Item, OutputStream
from cedar.engine.request import FinishReason, Request
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

#: Seconds the idle engine thread waits for a command before it looks at its stop flag.
_IDLE_SECONDS = 0.1
_STOPPED = "the engine has stopped; restart the server"

Command = Callable[[], None]


@dataclass(frozen=True)
class EngineSnapshot:
    """Counts at one moment, for health, metrics and the live page."""

    running: int
    waiting: int
    total_blocks: int
    free_blocks: int
    preemptions: int


class AsyncEngine:
    """An engine on its own thread.

    Args:
        engine: not used by anybody else from now on.
        max_waiting: requests that may wait; more are refused with `QueueFullError`.
        on_step: called on the engine thread after every step with its outputs (metrics).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        on_step: Callable[[Sequence[StepOutput]], None] | None = None,
    ) -> None:
        self.engine = engine
        self._max_waiting, self._on_step = max_waiting, on_step
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._pending: set[str] = set()  # ids handed over but not yet in the engine
        self._calls: set[Callable[[Exception], None]] = set()  # `call`s that wait for their result
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="cedar-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for the thread; running requests are aborted.

        What is on its way to the prefix store is written, then the store is closed.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.engine.close()

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine thread; None while it is healthy."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether a request handed over now would be run."""
        return self._thread.is_alive() and self._failure is None and not self._stopping.is_set()

    def snapshot(self) -> EngineSnapshot:
        """Counts right now; read without stopping the engine."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        return EngineSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._pending),
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            preemptions=scheduler.preemptions,
        )

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *,
        eos_token_id: int | None = None, index: int = 0, cache_salt: bytes = b"",
    ) -> AsyncIterator[StepOutput]:  # fmt: skip
        """Run one completion; closing the iterator early aborts it, once.

        Raises:
            QueueFullError: too many wait.   RequestError, DoesNotFitError: it can never run.
            EngineDeadError: the engine thread has died.
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
        self._pending.update(stream.open_ids)
        self._commands.put(lambda: self._add(requests))
        if self._ended:  # it ended between the check and now, and may not have seen this stream
            stream.close()
            raise EngineDeadError(_STOPPED)
        return stream

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse now what could never run, or what must not wait.

        Raises:
            QueueFullError: too many wait.   RequestError, DoesNotFitError: it can never run.
            EngineDeadError: the engine thread has died.
        """
        self._check_alive()
        for request in requests:
            if request.request_id in self._streams:
                raise RequestError(
                    f"request id {request.request_id!r} is already running", param="request_id"
                )
            self.engine.scheduler.check(request)
        if len(requests) > self._max_waiting:
            raise RequestError(
                f"one call asks for {len(requests)} completions, the queue holds "
                f"{self._max_waiting}; ask for fewer", param="n",
            )  # fmt: skip
        waiting = self.snapshot().waiting
        if waiting + len(requests) > self._max_waiting:
            raise QueueFullError(
                f"{waiting} requests are waiting, the limit is {self._max_waiting}; try again later"
            )

    def _check_alive(self) -> None:
        if self._failure is not None or self._stopping.is_set():
            raise EngineDeadError(_STOPPED)

    def tell(self, work: Command) -> None:
        """Run a function on the engine thread between two steps; do not wait for it."""
        self._commands.put(work)

    async def call(self, work: Callable[[], object]) -> object:
        """As `tell`, but wait for the function's result; what it raises is raised here.

        Raises:
            EngineDeadError: the engine has stopped, or stops before the function's turn.
        """
        self._check_alive()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()

        def settle(result: object, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def finish(result: object, error: Exception | None) -> None:
            self._calls.discard(fail)
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                logger.debug("the loop of a caller has closed")

        def fail(error: Exception) -> None:
            finish(None, error)

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # handed to the one caller it concerns
                fail(error)
            else:
                finish(result, None)

        self._calls.add(fail)
        self._commands.put(run)
        if self._ended:  # it ended between the check and now, and may not have seen this call
            self._calls.discard(fail)
            raise EngineDeadError(_STOPPED)
        return await future

    def _add(self, requests: Sequence[Request]) -> None:
        self._pending.difference_update(request.request_id for request in requests)
        for request in requests:
            if request.request_id not in self._streams:
                continue  # its client left before it was queued
            try:
                self.engine.submit(request)
            except Exception as error:  # handed to the one client it concerns
                self._deliver([(request.request_id, error)])

    def _end(self, request_id: str) -> None:
        """End a completion whose client has left or has had enough."""
        self._streams.pop(request_id, None)
        self._commands.put(lambda: self.engine.abort(request_id))

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
            try:
                loop.call_soon_threadsafe(_hand_over, streams)
            except RuntimeError:
                logger.debug("the loop of a client has closed")

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._obey(wait=not self.engine.has_work)
                if not self.engine.has_work:
                    continue
                self._step()
        except BaseException as error:  # the border: nothing above this thread could see it
            logger.exception("engine thread died")
            self._failure = error
        finally:
            self._end_all()

    def _step(self) -> None:
        # Of its own, so that an idle engine's thread holds no output, and with it no prompt.
        outputs = self.engine.step()
        self._deliver([(output.request.request_id, output) for output in outputs])
        if self._on_step is not None:
            self._on_step(outputs)

    def _obey(self, *, wait: bool) -> None:
        """Run queued commands; when idle, wait for one."""
        try:
            while True:
                self._commands.get(timeout=_IDLE_SECONDS if wait else 0)()
                wait = False
        except queue.Empty:
            return

    def _end_all(self) -> None:
        """Tell every consumer that nothing more will come."""
        self._ended = True
        for fail in list(self._calls):
            fail(EngineDeadError(_STOPPED))
        for request_id in list(self._streams):
            request = self.engine.find(request_id)
            if self._failure is not None:
                item: Item = EngineDeadError(f"the engine has died: {self._failure}")
            elif request is None:
                item = EngineDeadError("the engine has stopped")
            else:
                self.engine.abort(request_id)
                item = StepOutput(request, None, finish_reason=FinishReason.ABORT)
            self._deliver([(request_id, item)])


def _hand_over(streams: dict[OutputStream, list[Item]]) -> None:
    for stream, items in streams.items():
        stream.put(items)
