"""`EngineHost`: where an engine runs, as `AsyncEngine` sees it; the commands and events between them.

A host is a thread (`thread_host.py`) or a process (`cedar.server.process_host`). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cedar.engine.engine_status import EngineCounts, EngineDetails, EngineInfo
from cedar.engine.output import StepOutput
from cedar.engine.request import Request


@dataclass(frozen=True)
class Submit:
    """Queue these requests, in this order."""

    requests: Sequence[Request]


@dataclass(frozen=True)
class Abort:
    """End a request; one that is unknown or has ended is ignored."""

    request_id: str


@dataclass(frozen=True)
class Call:
    """Run a function between two steps and answer with its result.

    Attributes:
        number: comes back with the answer.
        work: gets the `EngineLoop`; picklable where the host is a process.
    """

    number: int
    work: Callable[[Any], Any]


Command = Submit | Abort | Call


@dataclass(frozen=True)
class Stepped:
    """The engine has run a step; `outputs` in scheduling order."""

    outputs: Sequence[StepOutput]


@dataclass(frozen=True)
class Refused:
    """A request could not be queued."""

    request_id: str
    error: Exception


@dataclass(frozen=True)
class Answered:
    """The result of a `Call`, or what it raised."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Ended:
    """The last event. `failure`: what killed the engine; None after a stop."""

    failure: BaseException | None = None


Event = Stepped | Refused | Answered | Ended


class EngineHost(Protocol):
    """An engine that runs by itself."""

    @property
    def info(self) -> EngineInfo:
        """What never changes."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether commands are still obeyed."""
        ...

    def start(self, receive: Callable[[Event], None]) -> None:
        """Begin; `receive` gets every event in order, on whichever thread the host has for that."""
        ...

    def put(self, command: Command) -> None:
        """Have a command obeyed before the next step; never waits for it."""
        ...

    def stop(self) -> None:
        """Stop after the current step, abort what runs, close the engine, wait for all that."""
        ...

    def counts(self) -> EngineCounts:
        """The latest counts there are."""
        ...

    def details(self) -> EngineDetails:
        """The latest details there are."""
        ...
