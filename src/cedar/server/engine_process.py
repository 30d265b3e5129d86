"""The process that runs the engine of `cedar serve`: `python -m cedar.server.engine_process IN OUT`.

Started by `process_host.py`. It has the weights, the caches and the prefix store; text, JSON and HTTP
are in the server's process, so that neither waits for the other's Python. It lives as long as the
server: when the pipe of commands closes, the server has died, and it ends at once, as by a kill.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

from cedar.engine.engine import Engine
from cedar.engine.engine_loop import EngineLoop
from cedar.engine.engine_status import EngineDetails
from cedar.engine.host import Answered, Command, Ended, Event, Stepped
from cedar.errors import CedarError
from cedar.server.config import LOG_FORMAT
from cedar.server.engine_wire import EngineSpec, Message, Ready, Token, pack, to_tokens

logger = logging.getLogger(__name__)

#: Seconds after which metrics and the live view learn of a change.
_TELL_SECONDS = 0.25


@dataclass
class Inbox:
    """What the server has sent, read by a thread of its own so that its death is seen at once."""

    pipe: Connection
    commands: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    stop_wanted: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Until the pipe closes; None asks for a stop."""
        while True:
            try:
                command = self.pipe.recv()
            except (EOFError, OSError):
                os._exit(1)
            except Exception:  # the border: a command that cannot be read has no caller to be told
                logger.exception("engine process got a command that it cannot read")
                os._exit(1)
            if command is None:
                self.stop_wanted.set()
            else:
                self.commands.put(command)


class Outbox:
    """Sends events with the state they left. Two threads use it: the engine's and `keep_telling`'s.

    Args:
        pipe: to the server.   engine: whose events they are.
    """

    def __init__(self, pipe: BinaryIO, engine: Engine) -> None:
        self._pipe, self._engine, self._sending = pipe, engine, threading.Lock()
        self._told = engine.details()

    def ready(self) -> None:
        """Say that the engine is there."""
        self._write(pack(Ready(self._engine.info, self._engine.counts(), self._told)))

    def report(self, event: Event) -> None:
        """Send an event; with the details where the engine has come to rest, or somebody asked."""
        rests = not self._engine.has_work or isinstance(event, Answered)
        sent: list[Token] | Event = event
        if isinstance(event, Stepped):
            sent = to_tokens(event.outputs)
        elif isinstance(event, Ended) and event.failure is not None:
            # As text: the class of whatever went wrong may not be one that can be sent.
            sent = Ended(RuntimeError(f"{type(event.failure).__name__}: {event.failure}"))
        try:
            self._send(sent, self._engine.details() if rests else None)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            if not isinstance(event, Answered):
                raise
            self._send(Answered(event.number, error=RuntimeError(str(error))), None)

    def keep_telling(self, ended: threading.Event) -> None:
        """Send the details whenever they have changed, also within a long step and after it."""
        while not ended.wait(_TELL_SECONDS):
            details = self._engine.details()
            if details != self._told:
                self._send([], details)

    def _send(self, event: Any, details: EngineDetails | None) -> None:
        with self._sending:
            self._write(pack(Message(event, self._engine.counts(), details)))
            self._told = details or self._told

    def _write(self, message: bytes) -> None:
        try:
            self._pipe.write(message)
            self._pipe.flush()
        except BrokenPipeError:  # the server has died, and `Inbox` has not been told yet
            os._exit(1)


def run(commands: Connection, events: BinaryIO) -> int:
    """Build the engine that the first message asks for and run it; the process's exit status."""
    spec, level = commands.recv()
    logging.basicConfig(level=level, format=LOG_FORMAT)
    inbox = Inbox(commands)
    threading.Thread(target=inbox.read, name="cedar-inbox", daemon=True).start()
    assert isinstance(spec, EngineSpec)
    try:
        llm = spec.build()
    except (CedarError, OSError) as error:  # what the command line tells without a traceback
        events.write(pack(error))
        events.flush()
        return CedarError.exit_code
    outbox = Outbox(events, llm.engine)
    outbox.ready()
    ended = threading.Event()
    teller = threading.Thread(
        target=outbox.keep_telling, args=(ended,), name="cedar-teller", daemon=True
    )
    teller.start()
    EngineLoop(llm.engine, inbox.commands, inbox.stop_wanted).run(outbox.report)
    ended.set()
    teller.join()  # before the store and the pipe are closed
    llm.close()
    return 0


if __name__ == "__main__":
    # A service manager's signals reach every process; the server decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with (
        Connection(int(sys.argv[1]), writable=False) as to_obey,
        open(int(sys.argv[2]), "wb") as out,
    ):
        sys.exit(run(to_obey, out))
