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
from cedar.engine.request import FinishReason, Request
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import EngineDeadError, QueueFullError

logger = logging.getLogger(__name__)

#: Seconds the idle engine thread waits for a command before it looks at its stop flag.
_IDLE_SECONDS = 0.1

Command = Callable[[], None]


@dataclass(frozen=True)
class EngineSnapshot:
    """Counts at one moment, for health, metrics and the live page."""

    running: int
    waiting: int
    total_blocks: int
    free_blocks: int


@dataclass
class _Consumer:
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[StepOutput | BaseException]

    def put(self, item: StepOutput | BaseException) -> None:
        """Hand over from the engine thread; a consumer whose loop has closed is gone."""
        try:
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)
        except RuntimeError:
            logger.debug("consumer loop closed")


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
        self._consumers: dict[str, _Consumer] = {}
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._pending = 0
        self._thread = threading.Thread(target=self._run, name="cedar-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for the thread; running requests are aborted."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine thread; None while it is healthy."""
        return self._failure

    def snapshot(self) -> EngineSnapshot:
        """Counts right now; read without stopping the engine."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        return EngineSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self._pending,
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
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
        self.check(request)
        consumer = _Consumer(asyncio.get_running_loop(), asyncio.Queue())
        self._consumers[request_id] = consumer
        self._pending += 1
        self._commands.put(lambda: self._add(request))
        ended = False
        try:
            while not ended:
                item = await consumer.outputs.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            self._consumers.pop(request_id, None)
            if not ended:
                self._commands.put(lambda: self.engine.abort(request_id))

    def check(self, request: Request) -> None:
        """Refuse now what could never run, or what must not wait. Raises as `generate`."""
        if self._failure is not None or self._stopping.is_set():
            raise EngineDeadError("the engine has stopped; restart the server")
        self.engine.scheduler.check(request)
        waiting = self.snapshot().waiting
        if waiting >= self._max_waiting:
            raise QueueFullError(
                f"{waiting} requests are waiting, the limit is {self._max_waiting}; try again later"
            )

    async def call(self, work: Callable[[], object]) -> object:
        """Run a function on the engine thread between two steps, and wait for its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()

        def settle(result: object) -> None:
            if not future.done():
                future.set_result(result)

        def run() -> None:
            loop.call_soon_threadsafe(settle, work())

        self._commands.put(run)
        return await future

    def _add(self, request: Request) -> None:
        self._pending -= 1
        if request.request_id not in self._consumers:
            return  # its client left before it was queued
        try:
            self.engine.submit(request)
        except Exception as error:  # handed to the one request it concerns
            self._deliver(request.request_id, error)

    def _deliver(self, request_id: str, item: StepOutput | BaseException) -> None:
        consumer = self._consumers.get(request_id)
        if consumer is not None:
            consumer.put(item)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._obey(wait=not self.engine.has_work)
                if not self.engine.has_work:
                    continue
                outputs = self.engine.step()
                for output in outputs:
                    self._deliver(output.request.request_id, output)
                if self._on_step is not None:
                    self._on_step(outputs)
        except BaseException as error:  # the border: nothing above this thread could see it
            logger.exception("engine thread died")
            self._failure = error
        finally:
            self._end_all()

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
        for request_id in list(self._consumers):
            if self._failure is not None:
                error = EngineDeadError(f"the engine has died: {self._failure}")
                self._deliver(request_id, error)
                continue
            request = self.engine.find(request_id)
            self.engine.abort(request_id)
            if request is not None:
                request.finish_reason = FinishReason.ABORT
                self._deliver(request_id, StepOutput(request, None))
            else:
                self._deliver(request_id, EngineDeadError("the engine has stopped"))
