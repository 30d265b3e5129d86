"""`ProcessHost`: the engine of a server in a process of its own; this is the server's side of it.

Made by `launch.py`, used by `AsyncEngine`. Events are read on the asyncio loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from cedar.engine.engine_status import EngineCounts, EngineDetails
from cedar.engine.host import Abort, Command, Ended, Event, Refused, Stepped, Submit
from cedar.engine.request import Request
from cedar.errors import CedarError, EngineDeadError
from cedar.server.engine_wire import EngineSpec, Message, Ready, Unpacker, to_outputs

#: Bytes that are taken from the pipe at once; it holds 64 KiB.
_READ_BYTES = 1 << 16


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
        theirs, self._commands = multiprocessing.Pipe(duplex=False)
        # Events are read by an asyncio loop, which makes its end non-blocking: a pipe of their own.
        self._events, writable = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cedar.server.engine_process",
                f"{theirs.fileno()}",
                f"{writable}",
            ],
            pass_fds=[theirs.fileno(), writable],
        )
        theirs.close()
        os.close(writable)
        self.pid = self._process.pid
        self._sending, self._unpacker = threading.Lock(), Unpacker()
        self._requests: dict[str, Request] = {}
        self._receive: Callable[[Event], None] | None = None
        self._has_ended = False
        self._send((spec, logging.getLogger().getEffectiveLevel()))
        ready = self._first()
        self.info, self._counts, self._details = ready.info, ready.counts, ready.details

    def _first(self) -> Ready:
        """Wait until the model has been loaded."""
        messages: list[Any] = []
        try:
            while not messages and (piece := os.read(self._events, _READ_BYTES)):
                messages = self._unpacker.feed(piece)
        except BaseException:  # Ctrl-C: nothing of it may stay behind
            self._process.kill()
            raise
        if not messages:
            raise EngineDeadError(
                f"the engine process ended with status {self._process.wait()} while it loaded the "
                "model; its own messages are above"
            )
        first = messages[0]
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
        loop.add_reader(self._events, self._read, loop)

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
                self._commands.send(message)
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
        """Take what has come."""
        piece = os.read(self._events, _READ_BYTES)
        for message in self._unpacker.feed(piece):
            self._take(message)
        if not piece:
            loop.remove_reader(self._events)
            os.close(self._events)
            if not self._has_ended:
                status = self._process.wait()
                self._end(Ended(RuntimeError(f"its process ended with status {status}")))

    def _take(self, message: Message) -> None:
        assert self._receive is not None
        self._counts = message.counts
        if message.details is not None:
            self._details = message.details
        event = message.event
        if isinstance(event, list):
            outputs = to_outputs(event, self._requests)
            for output in outputs:
                if output.finish_reason is not None:
                    del self._requests[output.request.request_id]
            self._receive(Stepped(outputs))
        elif isinstance(event, Ended):
            self._end(event)
        else:
            if isinstance(event, Refused):
                self._requests.pop(event.request_id, None)
            self._receive(event)

    def _end(self, event: Ended) -> None:
        assert self._receive is not None
        self._has_ended = True
        self._receive(event)
