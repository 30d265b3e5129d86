"""Rotary tables: two frequency sets per model, float32 angles. Called by `causal_lm` and the layers.

Window-only layers rotate with `rope_theta`; every layer that reads compressed rows rotates all of
its rows with `compress_rope_theta` and YaRN, whatever the sequence length (specification 4.4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.model.spans import Spans


def base_frequencies(rope_dim: int, theta: float) -> Tensor:
    """`theta^(-2i / rope_dim)` for i in 0 .. rope_dim/2 - 1, float32."""
    # On the CPU explicitly: models are built under the meta device, tables are not weights.
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim
    return 1.0 / (theta**exponents)


def yarn_frequencies(
    rope_dim: int, theta: float, *, factor: float, beta_fast: float, beta_slow: float, original: int
) -> Tensor:
    """Base frequencies, divided by `factor` above the YaRN band and blended inside it.

    There is no attention temperature in this architecture (specification 4.4).
    """

    def correction(rotations: float) -> float:
        return rope_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    span = max(high - low, 1e-3)
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu")
    # In the order of the reference program: at high positions another order turns visibly elsewhere.
    keep = 1 - ((pairs - low) / span).clamp(0, 1)
    frequencies = base_frequencies(rope_dim, theta)
    return frequencies / factor * (1 - keep) + frequencies * keep


class Rotary:
    """The two frequency sets of a model."""

    def __init__(self, config: ModelConfig) -> None:
        self.plain = base_frequencies(config.qk_rope_head_dim, config.rope_theta)
        self.yarn = yarn_frequencies(
            config.qk_rope_head_dim,
            config.compress_rope_theta,
            factor=config.rope_factor,
            beta_fast=config.rope_beta_fast,
            beta_slow=config.rope_beta_slow,
            original=config.rope_original_max_position_embeddings,
        )

    def cos_sin(self, spec: LayerSpec, positions: Tensor) -> Tensor:
        """Table of a layer at given positions: float32 `[n, rope/2, 2]`.

        The angle is a float32 product, as in the reference program: float64 angles differ by up to
        0.05 rad near position 1,000,000.
        """
        frequencies = self.plain if spec.role == "window" else self.yarn
        angles = positions.float().unsqueeze(1) * frequencies
        return torch.stack((angles.cos(), angles.sin()), dim=-1)


class RotaryTables:
    """Tables of one call, computed once per (frequency set, spans) and shared by its layers."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[bool, Spans], Tensor] = {}

    def rows(self, spec: LayerSpec, spans: Spans) -> Tensor:
        """Table for the rows of spans, float32 `[N, rope/2, 2]`."""
        key = (spec.role == "window", spans)
        if key not in self._tables:
            self._tables[key] = self._rotary.cos_sin(spec, spans.positions)
        return self._tables[key]

    def at(self, spec: LayerSpec, positions: Tensor) -> Tensor:
        """Table at explicit positions (compressed rows sit at their group's first token)."""
        return self._rotary.cos_sin(spec, positions)
