"""Recipes: what is trained, in which phases, with which rates. Plain data; `trainer.py` runs them.

Progress runs from 0 to 1 over a budget given in tokens or in minutes, so a recipe never names a
step count and a run always ends with a decayed learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cedar.errors import UsageError


@dataclass(frozen=True)
class PhaseSpec:
    """One phase of a run.

    Attributes:
        until: progress at which it ends; the last phase ends at 1.
        length: tokens per training sequence; divides the recipe's window.
        sparse: attention reads the index's top-k only.   quantise: straight-through fake
            quantisation of rows, weights and projection inputs.
        accumulate: windows batches summed into one update.
    """

    until: float
    length: int
    sparse: bool
    quantise: bool
    accumulate: int = 1


@dataclass(frozen=True)
class Recipe:
    """One training run.

    Attributes:
        preset: config preset.   batch, window: windows per batch and tokens per window.
        lr, muon_lr: peaks.   warmup_tokens: linear rise.   decay_from: progress at which the rate
            starts to fall linearly to `floor` of the peak.
        bias_step: router bias change per update.   index_queries: see `rows.Phase`.
    """

    preset: str
    phases: tuple[PhaseSpec, ...]
    batch: int
    window: int
    lr: float
    muon_lr: float
    warmup_tokens: int
    decay_from: float
    floor: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    bias_step: float = 1e-3
    index_queries: int = 32

    def phase_at(self, progress: float) -> PhaseSpec:
        """The phase that `progress` falls into."""
        for phase in self.phases:
            if progress < phase.until:
                return phase
        return self.phases[-1]

    def rate_at(self, progress: float, tokens: int) -> float:
        """Factor on the peak learning rates: warm-up, plateau, linear decay."""
        rate = min(1.0, (tokens + 1) / max(1, self.warmup_tokens))
        if progress > self.decay_from:
            left = max(0.0, (1 - progress) / (1 - self.decay_from))
            rate *= self.floor + (1 - self.floor) * left
        return rate


_NANO = Recipe(
    preset="nano",
    phases=(
        PhaseSpec(until=0.45, length=512, sparse=False, quantise=False),
        PhaseSpec(until=0.60, length=512, sparse=True, quantise=False),
        PhaseSpec(until=0.82, length=1024, sparse=True, quantise=False, accumulate=2),
        PhaseSpec(until=1.0, length=1024, sparse=True, quantise=True, accumulate=2),
    ),
    batch=4,
    window=1024,
    lr=2e-3,
    muon_lr=5e-3,
    warmup_tokens=300_000,
    decay_from=0.65,
)

_TINY = Recipe(
    preset="tiny",
    phases=(
        PhaseSpec(until=0.4, length=16, sparse=False, quantise=False),
        PhaseSpec(until=0.7, length=32, sparse=True, quantise=False),
        PhaseSpec(until=1.0, length=32, sparse=True, quantise=True, accumulate=2),
    ),
    batch=2,
    window=32,
    lr=4e-3,
    muon_lr=4e-3,
    warmup_tokens=256,
    decay_from=0.6,
    index_queries=8,
)


def recipe(name: str) -> Recipe:
    """The named recipe.

    Raises:
        UsageError: unknown; the message lists the known ones.
    """
    known = {"nano": _NANO, "tiny": _TINY}
    if name not in known:
        raise UsageError(f"unknown recipe {name!r}; allowed: {', '.join(known)}")
    return known[name]


def nats_to_bits_per_byte(nats_per_token: float, tokens: int, num_bytes: int) -> float:
    """Tokenizer-independent loss: nats of all tokens, in bits, over the bytes of their text."""
    return nats_per_token * tokens / math.log(2) / num_bytes
