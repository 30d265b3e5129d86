"""`EngineLoop`: runs `Engine.step` for as long as there is work, obeying commands between steps.

It owns the engine; everybody else puts commands in its queue and reads the events it reports. Run by
`thread_host.py` on a thread, and by the server's engine process. Commands and events are plain data,
so that they can come from another process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from cedar.engine.engine import Engine
from cedar.engine.host import (
    Abort,
    Answered,
    Call,
    Command,
    Ended,
    Event,
    Refused,
    Stepped,
    Submit,
)
from cedar.engine.output import StepOutput
from cedar.engine.request import FinishReason, Request

logger = logging.getLogger(__name__)

#: Seconds an idle loop waits for a command before it looks at its stop flag.
_IDLE_SECONDS = 0.1


class EngineLoop:
    """One engine at work.

    Args:
        engine: not used by anybody else from now on.
        commands: read here only; anybody may put.
        stop_wanted: set it to end `run` after the current step.

    Attributes:
        engine: for the functions of `Call` commands.
    """

    def __init__(
        self, engine: Engine, commands: queue.SimpleQueue[Command], stop_wanted: threading.Event
    ) -> None:
        self.engine = engine
        self._commands, self._stop_wanted = commands, stop_wanted

    @property
    def queued(self) -> int:
        """Commands that wait for the end of the current step."""
        return self._commands.qsize()

    def run(self, report: Callable[[Event], None]) -> None:
        """Work until a stop is wanted, or until the engine fails; the last event is `Ended`.

        Args:
            report: called on this thread.
        """
        failure: BaseException | None = None
        try:
            while not self._stop_wanted.is_set():
                has_obeyed = self._obey(report, wait=not self.engine.has_work)
                if self.engine.has_work:
                    report(Stepped(self.engine.step()))
                elif has_obeyed:  # an abort may have left nothing: counts have changed all the same
                    report(Stepped(()))
        except BaseException as error:  # the border: nothing above this loop could see it
            logger.exception("engine died")
            failure = error
        finally:
            if failure is None and (aborted := self._abort_all()):
                report(Stepped(aborted))
            report(Ended(failure))

    def _obey(self, report: Callable[[Event], None], *, wait: bool) -> bool:
        """Run queued commands; when idle, wait for one. Whether there was any."""
        has_obeyed = False
        try:
            while True:
                command = self._commands.get(wait and not has_obeyed, _IDLE_SECONDS)
                has_obeyed = True
                if isinstance(command, Submit):
                    self._submit(command.requests, report)
                elif isinstance(command, Abort):
                    self.engine.abort(command.request_id)
                else:
                    report(self._call(command))
        except queue.Empty:
            return has_obeyed

    def _submit(self, requests: Sequence[Request], report: Callable[[Event], None]) -> None:
        for request in requests:
            try:
                self.engine.submit(request)
            except Exception as error:  # handed to the one client it concerns
                report(Refused(request.request_id, error))

    def _call(self, command: Call) -> Answered:
        try:
            return Answered(command.number, command.work(self))
        except Exception as error:  # handed to the one caller it concerns
            return Answered(command.number, error=error)

    def _abort_all(self) -> list[StepOutput]:
        outputs = []
        for request in self.engine.requests:
            self.engine.abort(request.request_id)
            outputs.append(StepOutput(request, None, finish_reason=FinishReason.ABORT))
        return outputs
