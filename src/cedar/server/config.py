"""`ServerConfig`: addresses, keys and limits of one server. No engine settings, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from cedar.errors import UsageError

#: Of the logs of both processes.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a model is offered.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        served_model_names: names clients may use; the first is the one shown.
        api_keys: any of them opens the API; empty = no key is needed.
        max_waiting: completions that may wait; more are refused with 429.
        retry_after_seconds: what a refused client is told.
        max_body_bytes: larger request bodies are refused with 413.
        keep_alive_seconds: silence on an event stream after which a comment is sent.
        grace_seconds: how long running requests may go on after SIGTERM or SIGINT.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    retry_after_seconds: int = 1
    max_body_bytes: int = 32 * 2**20
    keep_alive_seconds: float = 15.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise UsageError(f"served_model_names={self.served_model_names!r}: give a name")
        if any(not key for key in self.api_keys):
            raise UsageError("an API key is empty; leave it out or give it a value")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port={self.port} must be in 0..65535")
        for name in ("max_waiting", "retry_after_seconds", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1")
        if self.keep_alive_seconds <= 0:
            raise UsageError(f"keep_alive_seconds={self.keep_alive_seconds} must be above 0")
        if self.grace_seconds < 0:
            raise UsageError(f"grace_seconds={self.grace_seconds} must not be negative")
