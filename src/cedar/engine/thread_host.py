"""`ThreadHost`: an engine on a thread of this process. For tests and for programs with an engine of
their own; `cedar serve` gives it a process instead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from cedar.engine.engine import Engine
from cedar.engine.engine_loop import EngineLoop
from cedar.engine.engine_status import EngineCounts, EngineDetails
from cedar.engine.host import Command, Event


class ThreadHost:
    """An engine and its thread.

    Args:
        engine: not used by anybody else from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.info = engine, engine.info
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stop_wanted = threading.Event()
        self._loop = EngineLoop(engine, self._commands, self._stop_wanted)
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, receive: Callable[[Event], None]) -> None:
        """Start the thread; events are received on it."""
        self._thread = threading.Thread(
            target=self._loop.run, args=(receive,), name="cedar-engine", daemon=True
        )
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queue a command."""
        self._commands.put(command)

    def stop(self) -> None:
        """As `EngineHost.stop`; what is on its way to the prefix store is written first."""
        self._stop_wanted.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self.engine.close()

    def counts(self) -> EngineCounts:
        """Counts right now."""
        return self.engine.counts()

    def details(self) -> EngineDetails:
        """Details right now."""
        return self.engine.details()
