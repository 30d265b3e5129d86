"""`ProcessHost`: the engine of a server in a process of its own; this is the server's side of it.

Made by `launch.py`, used by `AsyncEngine`. Events are read on the asyncio loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from cedar.engine.engine_status import EngineCounts, EngineDetails
from cedar.engine.host import Abort, Command, Ended, Event, Refused, Stepped, Submit
from cedar.engine.request import Request
from cedar.errors import CedarError, EngineDeadError
from cedar.server.engine_wire import EngineSpec, Message, Ready, to_outputs


class ProcessHost:
    """An engine process.

    Args:
        spec: how the engine is built.

    Attributes:
        info: what never changes.   pid: of the process.

    Raises:
        CedarError: as `LLM` raises it, or the process ended while it loaded the model.
    """

    def __init__(self, spec: EngineSpec) -> None:
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "cedar.server.engine_process", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe, self._sending = ours, threading.Lock()
        self.pid = self._process.pid
        ours.send((spec, logging.getLogger().getEffectiveLevel()))
        ready = self._first()
        self.info, self._counts, self._details = ready.info, ready.counts, ready.details
        self._requests: dict[str, Request] = {}
        self._receive: Callable[[Event], None] | None = None
        self._has_ended = False

    def _first(self) -> Ready:
        """Wait until the model has been loaded."""
        try:
            first = self._pipe.recv()
        except (EOFError, OSError):
            first = EngineDeadError(
                f"the engine process ended with status {self._process.wait()} while it loaded the "
                "model; its own messages are above"
            )
        except BaseException:  # Ctrl-C: nothing of it may stay behind
            self._process.kill()
            raise
        if isinstance(first, CedarError):
            self._process.wait()
            raise first
        assert isinstance(first, Ready)
        return first

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return not self._has_ended and self._process.poll() is None

    def start(self, receive: Callable[[Event], None]) -> None:
        """Receive events on the running loop from now on."""
        self._receive = receive
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._read, loop)

    def put(self, command: Command) -> None:
        """Send a command; nothing happens if the process has ended, which is an event of its own."""
        if isinstance(command, Submit):
            self._requests.update({request.request_id: request for request in command.requests})
        elif isinstance(command, Abort):
            self._requests.pop(command.request_id, None)
        self._send(command)

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError:
            logging.getLogger(__name__).debug("the engine process has ended")

    def stop(self) -> None:
        """As `EngineHost.stop`; any thread may call it."""
        self._send(None)
        self._process.wait()

    def counts(self) -> EngineCounts:
        """Counts after the last step or command."""
        return self._counts

    def details(self) -> EngineDetails:
        """Details of the last quarter of a second."""
        return self._details

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take one message; the loop calls again while there are more."""
        assert self._receive is not None
        try:
            message: Message = self._pipe.recv()
        except (EOFError, OSError):
            loop.remove_reader(self._pipe.fileno())
            if not self._has_ended:
                status = self._process.wait()
                self._end(Ended(RuntimeError(f"its process ended with status {status}")))
            return
        self._counts = message.counts
        if message.details is not None:
            self._details = message.details
        event = message.event
        if isinstance(event, Ended):
            self._end(event)
            return
        if isinstance(event, Refused):
            self._requests.pop(event.request_id, None)
            self._receive(event)
            return
        if not isinstance(event, list):
            self._receive(event)
            return
        outputs = to_outputs(event, self._requests)
        for output in outputs:
            if output.finish_reason is not None:
                del self._requests[output.request.request_id]
        self._receive(Stepped(outputs))

    def _end(self, event: Ended) -> None:
        assert self._receive is not None
        self._has_ended = True
        self._receive(event)
