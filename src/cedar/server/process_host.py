"""`ProcessHost`: the engine of a server in a process of its own; this is the server's side of it.

Made by `launch.py`, used by `AsyncEngine`. Events are read on the asyncio loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from cedar.engine.engine_status import EngineCounts, EngineDetails
from cedar.engine.host import Abort, Command, Ended, Event, Refused, Stepped, Submit
from cedar.engine.request import Request
from cedar.errors import EngineDeadError
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
                "-P",
                "-m",
                "cedar.server.engine_process",
                f"{theirs.fileno()}",
                f"{writable}",
            ],
            pass_fds=[theirs.fileno(), writable],
            # A Ctrl-C is for the server alone, also before the engine process can ignore it; and
            # modules are found where the server found them, not in whichever directory it runs in.
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
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
            self._give_up()
            raise
        if messages and isinstance(messages[0], Ready):
            return messages[0]
        status = self._give_up()
        if messages:
            raise messages[0]
        raise EngineDeadError(
            f"the engine process {_describe(status)} while it loaded the model; look at its own "
            "messages above and at the memory left"
        )

    def _give_up(self) -> int:
        """Let go of a process that ends without having been ready; its exit status."""
        status = self._process.wait()  # first: without its pipe it would leave before its messages
        os.close(self._events)
        self._commands.close()
        return status

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
                status = _describe(self._process.wait())
                self._end(Ended(RuntimeError(f"its process {status}")))

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


def _describe(status: int) -> str:
    """How a process ended, in words."""
    if status != -signal.SIGKILL:
        return f"ended with status {status}"
    return f"ended with status {status} (killed, as the system does when memory runs out)"
