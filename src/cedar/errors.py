"""The whole exception tree of cedar; every other module may import this one, it imports nothing.

    CedarError
    |-- UsageError          a flag, argument or call that cannot be honoured          exit 2
    |   `-- RequestError    one field of one request is out of range                  exit 2
    |-- CheckpointError     config or weights are missing, extra, damaged or invalid  exit 4
    |   `-- ConfigError     config.json, or the layer plan it describes, is invalid   exit 4
    |-- QueueFullError      too many requests wait; try again later                   exit 1
    |-- EngineDeadError     the step loop has stopped, nothing can run                exit 1
    |-- DoesNotFitError     the memory or length budget is too small, says by how much  exit 3
    `-- StoreError          a prefix store is locked, unwritable or not ours          exit 5

A message says what was wrong, the value, what is allowed, and what to do.
"""

from __future__ import annotations


class CedarError(Exception):
    """Base of every error that a user, a file, a request or a peer can cause."""

    exit_code = 1


class UsageError(CedarError):
    """A flag, an argument or a combination of calls that cannot be honoured."""

    exit_code = 2


class RequestError(UsageError):
    """One field of one generation request is out of range.

    Args:
        message: the full sentence shown to the user.
        param: name of the offending field, as in the OpenAI error object.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CheckpointError(CedarError):
    """Weights on disk do not match what the config asks for; names the tensor and the file."""

    exit_code = 4


class ConfigError(CheckpointError):
    """A model config is incomplete or describes a layer plan that cannot run."""


class DoesNotFitError(CedarError):
    """A length or memory budget is too small; says by how much and what would help."""

    exit_code = 3


class QueueFullError(CedarError):
    """Too many requests are waiting; the same request may be accepted later."""


class EngineDeadError(CedarError):
    """The engine's step loop has stopped; nothing will run until it is started again."""


class StoreError(CedarError):
    """A prefix store cannot be opened, or is not one of ours."""

    exit_code = 5
