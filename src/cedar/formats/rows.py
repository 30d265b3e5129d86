"""The byte calculator: the only place that knows how many bytes a stored row has. Imports no torch.

The pool allocates with it, a prefix store writes with it, the planner multiplies with it.

A row is contiguous: all values first, then all scales.

    main    | head_dim/2 B of E2M1 pairs, even element in the low nibble | head_dim/16 E4M3 scales |
    index   | index_head_dim/2 B of E2M1 pairs, same order | index_head_dim/32 E8M0 scales |
    window  | head_dim B of E4M3 | head_dim/32 E8M0 scales |

At the release's widths (head_dim 512, index_head_dim 128): 288, 68 and 528 bytes.
Source of the formats: specification section 6.2 of the architecture (deployment byte formats).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cedar.config.layer_plan import LayerPlan
from cedar.config.model_config import ModelConfig
from cedar.errors import ConfigError

RowKind = Literal["main", "index", "window"]

#: kind -> (values per byte, values per one-byte scale)
_LAYOUT: dict[RowKind, tuple[int, int]] = {"main": (2, 16), "index": (2, 32), "window": (1, 32)}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One kind of packed row.

    Attributes:
        kind: main (compressed K=V), index (index key) or window (window K=V).
        width: values per row.
    """

    kind: RowKind
    width: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % self.values_per_scale:
            raise ConfigError(
                f"a {self.kind} row of {self.width} values is not possible: the width must be a "
                f"positive multiple of {self.values_per_scale}, the values one scale covers"
            )

    @property
    def values_per_scale(self) -> int:
        """Values that share one scale byte."""
        return _LAYOUT[self.kind][1]

    @property
    def value_bytes(self) -> int:
        """Bytes of the packed values, before the scales."""
        return self.width // _LAYOUT[self.kind][0]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, after the values."""
        return self.width // self.values_per_scale

    @property
    def row_bytes(self) -> int:
        """Bytes of one whole row, unpadded."""
        return self.value_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class RowFormats:
    """The three row formats of one model."""

    main: RowFormat
    index: RowFormat
    window: RowFormat

    @classmethod
    def of(cls, config: ModelConfig) -> RowFormats:
        """The formats at a config's widths."""
        return cls(
            main=RowFormat("main", config.head_dim),
            index=RowFormat("index", config.index_head_dim),
            window=RowFormat("window", config.head_dim),
        )

    @property
    def global_row_bytes(self) -> int:
        """Bytes one KV owner keeps per compressed row: main row + index key (356 in the release)."""
        return self.main.row_bytes + self.index.row_bytes

    def kv_bytes(self, plan: LayerPlan, num_tokens: int) -> int:
        """Global KV bytes of one sequence: sum over owners of floor(tokens / ratio) rows.

        Only full layers own rows; Reuse and Reindex layers own none.
        """
        rows = sum(num_tokens // spec.compress_ratio for spec in plan.kv_owners)
        return rows * self.global_row_bytes

    def kv_bytes_per_token(self, plan: LayerPlan) -> float:
        """Slope of `kv_bytes`: sum over owners of row bytes / ratio (890 in the release).

        Exact for the released and the article's plan; a float because 1/ratio may not be whole.
        """
        return sum(self.global_row_bytes / spec.compress_ratio for spec in plan.kv_owners)

    def window_bytes(self, plan: LayerPlan, num_tokens: int | None = None) -> int:
        """Window ring bytes of one sequence, all backbone layers; constant in the context length.

        Args:
            plan: every layer has one ring of `sliding_window` rows.
            num_tokens: count only the filled slots of a shorter sequence; None = allocated.
        """
        rows = plan.sliding_window
        if num_tokens is not None:
            rows = min(rows, num_tokens)
        return len(plan) * rows * self.window.row_bytes

    def open_group_bytes(self, plan: LayerPlan) -> int:
        """Bytes of the open compression groups of one sequence.

        Each owner of ratio r > 1 carries up to r - 1 rows of (kv, gate) in fp32.
        """
        return sum(
            (spec.compress_ratio - 1) * 2 * self.main.width * 4
            for spec in plan.kv_owners
            if spec.compress_ratio > 1
        )
