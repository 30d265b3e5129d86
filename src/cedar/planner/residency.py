"""Bytes of the weights by residency class and by rank, and what one token reads of them.

Where each class CAN live is `weights.CAN_LIVE`; where it DOES live on a machine is `fit.place`.
"""

from __future__ import annotations

from typing import get_args

from cedar.config.model_config import ModelConfig
from cedar.errors import UsageError
from cedar.planner.expression import pow2ceil
from cedar.planner.ledger import Kind, Ledger
from cedar.planner.weights import (
    ModelWeights,
    Tally,
    WeightClass,
    expert_bytes,
    padded_width,
    weight_class,
)

CLASSES: tuple[WeightClass, ...] = get_args(WeightClass)

#: What an SSD reads at least, whatever was asked for.
SECTOR_BYTES = 4096

_HEADERS = "payload sizes of the safetensors headers"
_SCHEMA = "weight schema: shapes x bytes per value"


def class_bytes(tally: Tally) -> dict[WeightClass, int]:
    """Payload bytes of each residency class."""
    sums = dict.fromkeys(CLASSES, 0)
    for part, nbytes in tally.nbytes.items():
        sums[weight_class(part)] += nbytes
    return sums


def add_weights(
    ledger: Ledger, weights: ModelWeights, measured: dict[WeightClass, int] | None = None
) -> None:
    """Add bytes of each class and their total.

    Args:
        measured: bytes by class from a checkpoint's headers, instead of the schema's.
    """
    kind: Kind = "derived" if measured is None else "measured"
    sums = class_bytes(weights.total) if measured is None else measured
    source = _SCHEMA if measured is None else _HEADERS
    for name, nbytes in sums.items():
        ledger.add(f"weights.{name}_bytes", nbytes, "B", f"tensors of class {name}", source, kind)
    total = " + ".join(f"weights.{name}_bytes" for name in CLASSES)
    ledger.derive("weights.total_bytes", total, "B", "sum of the classes")


def add_ranks(
    ledger: Ledger, config: ModelConfig, weights: ModelWeights, ways: int, alignment: int
) -> None:
    """Add what one of `ways` tensor-parallel ranks holds, with padded experts.

    Raises:
        UsageError: the output groups, heads or vocabulary cannot be split that many ways.
    """
    for name in ("o_groups", "num_attention_heads", "index_n_heads", "vocab_size"):
        if getattr(config, name) % ways:
            raise UsageError(
                f"{ways} tensor-parallel ranks cannot share {name}={getattr(config, name)}: the "
                f"number of devices must divide it"
            )
    split = dict.fromkeys(CLASSES, 0)
    for part, nbytes in weights.total.split_bytes.items():
        split[weight_class(part)] += nbytes
    ledger.add("rank.ways", ways, "ranks", "devices of the machine", "tensor parallelism")
    inner = config.moe_intermediate_size
    padded = padded_width(inner, ways, alignment) if ways > 1 else inner
    ledger.add(
        "rank.expert_width", padded, "columns",
        f"{inner} split {ways} ways, padded to a multiple of {alignment}", "padding", "derived",
    )  # fmt: skip
    ledger.add(
        "rank.expert_bytes", expert_bytes(config, padded), "B", "one routed expert at that width",
        _SCHEMA, "derived",
    )  # fmt: skip
    for name in CLASSES:
        if name == "routed_experts":
            formula = "model.layers * model.experts * rank.expert_bytes"
        else:
            ledger.add(
                f"rank.{name}_split_bytes", split[name], "B", "tensors a rank holds its share of",
                "vocabulary, heads, groups and table rows are split; the rest is replicated",
                "derived",
            )  # fmt: skip
            formula = (
                f"weights.{name}_bytes - rank.{name}_split_bytes"
                f" + ceil_div(rank.{name}_split_bytes, rank.ways)"
            )
        ledger.derive(f"rank.{name}_bytes", formula, "B", "one rank")


def add_reads(ledger: Ledger, config: ModelConfig, weights: ModelWeights) -> None:
    """Add what one token reads of the classes that need not be hot."""
    ledger.add(
        "experts.bytes", expert_bytes(config), "B", "one routed expert, weights and scales",
        _SCHEMA, "derived",
    )  # fmt: skip
    ledger.derive(
        "experts.bytes_per_token", "model.layers * model.experts_per_token * experts.bytes",
        "B/token", "experts one decoded token reads",
    )  # fmt: skip
    ledger.add(
        "embed.bytes_per_token",
        2 * config.hidden_size,
        "B/token",
        "hidden_size * 2",
        _SCHEMA,
        "derived",
    )
    buffers = weights.engram_buffers
    if not buffers:
        return
    assert config.engram_max_ngram_size
    assert config.engram_n_heads
    assert config.engram_head_dim
    orders, dim = config.engram_max_ngram_size - 1, config.engram_head_dim
    ledger.add(
        "engram.rows_per_token", len(config.engram_layer_ids) * orders * config.engram_n_heads,
        "rows/token", "Engram layers * (max_ngram_size - 1) * heads", "config", "derived",
    )  # fmt: skip
    ledger.add(
        "engram.row_bytes", dim + dim // 32, "B",
        "engram_head_dim FP8 + engram_head_dim / 32 scales", _SCHEMA, "derived",
    )  # fmt: skip
    ledger.derive(
        "engram.bytes_per_token",
        "engram.rows_per_token * engram.row_bytes",
        "B/token",
        "payload read",
    )
    sectors = f"engram.rows_per_token * {SECTOR_BYTES}"
    ledger.derive(
        "engram.sector_bytes_per_token", sectors, "B/token",
        f"one {SECTOR_BYTES} B sector a row, when a row's scales lie beside its values",
    )  # fmt: skip
    ledger.derive(
        "engram.released_sector_bytes_per_token", f"2 * {sectors}", "B/token",
        "as released: values and scales are two tensors, so a row costs two sectors",
    )  # fmt: skip
    ledger.derive(
        "engram.prompt_rows", "phases.encode.tokens * engram.rows_per_token", "rows",
        "random reads of the prefill; ids are known, so they can be batched",
    )  # fmt: skip
    ledger.add(
        "engram.pinned_bytes", sum(pow2ceil(size) for size in buffers), "B",
        "each tensor rounded up to a power of two: " + " + ".join(f"{size:,}" for size in buffers),
        "page-locked allocators round a buffer to a power of two", "derived",
    )  # fmt: skip
