"""Small types shared by the config files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["nested", "flat"]
WeightDtype = Literal["bf16", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower's fields; recognised and sized, the tower is not run."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
