"""What a run has done, phase by phase: the measured side of every figure cedar prints. No torch.

Filled by `forward.py`; read by the CLI, `LLM` and benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class PhaseAccount:
    """One phase.

    Attributes:
        tokens: rows that entered the phase.
        layers: layers (for project: KV projections) each of them ran through.
        token_layers: rows x layers really run; below tokens * layers where layers run fewer rows.
        seconds: wall time.
    """

    tokens: int = 0
    layers: int = 0
    token_layers: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the body."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def add(self, tokens: int, layers: int, token_layers: int | None = None) -> None:
        """Add work; `token_layers` defaults to tokens * layers."""
        self.tokens += tokens
        self.layers = max(self.layers, layers)
        self.token_layers += tokens * layers if token_layers is None else token_layers


@dataclass
class Account:
    """The four phases of a request: prefill = encode + project + replay, then decode."""

    encode: PhaseAccount = field(default_factory=PhaseAccount)
    project: PhaseAccount = field(default_factory=PhaseAccount)
    replay: PhaseAccount = field(default_factory=PhaseAccount)
    decode: PhaseAccount = field(default_factory=PhaseAccount)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
