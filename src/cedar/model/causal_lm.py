"""`CausalLM`: the backbone as four phases over explicit rows. Called by engine and training.

    encode      embedding and encoder layers
    project_kv  compressed rows of decoder owners, straight from the encoder boundary
    decode      decoder layers (on the tail of a prompt: replay)
    logits      final collapse, norm, head

It knows tokens, spans and rows; not requests, blocks, files or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cedar.config.model_config import ModelConfig
from cedar.kernels.operators import Operators, Weight
from cedar.model.block import Block
from cedar.model.dense_rows import DenseRows
from cedar.model.kv import Rows
from cedar.model.layers import RMSNorm
from cedar.model.rotary import Rotary, RotaryTables
from cedar.model.spans import Spans


class Boundary(NamedTuple):
    """The stream between layers: stream `[N, C, D]` and the pre mix `[N, C]` that collapses it."""

    stream: Tensor
    pre: Tensor

    def rows(self, keep: Tensor | None) -> Boundary:
        """The given rows; None = all."""
        return self if keep is None else Boundary(self.stream[keep], self.pre[keep])


class Table(nn.Module):
    """A `[rows, width]` weight: embedding or head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class CausalLM(nn.Module):
    """The text backbone. Parameter names are the released tensor names.

    Args:
        config: the model.
        ops: kernel backend, shared by all layers.
        dtype: of activations: bfloat16 (the release) or float32.
    """

    def __init__(
        self, config: ModelConfig, ops: Operators, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.config, self.ops, self.dtype = config, ops, dtype
        self.plan = config.plan
        self.rotary = Rotary(config)
        self.embed = Table(config.vocab_size, config.hidden_size)
        self._blocks = [Block(config, spec, ops) for spec in self.plan.layers]
        self.layers = nn.ModuleList(self._blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.head = Table(config.vocab_size, config.hidden_size)

    def enter(self, ids: Tensor) -> Boundary:
        """Embed ids `[N]` into C identical copies; the first pre mix is one-hot on copy 0."""
        x = self.embed.weight[ids].to(self.dtype)
        copies = self.config.hc_mult
        pre = torch.zeros(ids.shape[0], copies)
        pre[:, 0] = 1.0
        return Boundary(x.unsqueeze(1).expand(-1, copies, -1).contiguous(), pre)

    def encode(
        self, ids: Tensor, spans: Spans, rows: Rows, engram_rows: Tensor | None = None
    ) -> Boundary:
        """Run the encoder on every row of `spans`; `ids` int64 `[N]`."""
        steps = [(spans, spans)] * self.plan.num_encoder_layers
        return self._run(self.enter(ids), 0, steps, rows, engram_rows)

    def project_kv(self, boundary: Boundary, spans: Spans, rows: Rows) -> None:
        """Store the compressed rows of every decoder owner fed from the boundary.

        No attention and no MoE run: collapse, the owner's norm, its compressor and index key.
        """
        tables = RotaryTables(self.rotary)
        for spec in self.plan.boundary_owners:
            block = self.block(spec.layer_id)
            u = block.attention_input(boundary.stream, boundary.pre)
            block.attn.append(u, spans, rows, tables)

    def decode(
        self, boundary: Boundary, steps: Sequence[tuple[Spans, Spans]], rows: Rows,
        engram_rows: Tensor | None = None,
    ) -> Boundary:  # fmt: skip
        """Run the decoder.

        Args:
            boundary: stream of the rows of the first step's spans.
            steps: per decoder layer, the spans that leave a window row and the queries whose
                output goes on; each layer's spans are the queries of the one before.
        """
        return self._run(boundary, self.plan.num_encoder_layers, steps, rows, engram_rows)

    def logits(self, last: Boundary) -> Tensor:
        """Float32 logits `[n, V]` of the stream leaving the last layer."""
        hidden = self.norm(self.ops.hc_collapse(last.stream, last.pre))
        return self.ops.linear(hidden.float(), Weight(self.head.weight))

    def forward_dense(self, ids: Tensor, rows: DenseRows, engram_rows: Tensor | None) -> Boundary:
        """All layers on all rows of `ids [B, T]` without a cache; the stream leaving the last layer."""
        batch, length = ids.shape
        spans = Spans(tuple(range(batch)), (0,) * batch, (length,) * batch)
        boundary = self.encode(ids.flatten(), spans, rows, engram_rows)
        self.project_kv(boundary, spans, rows)
        steps = [(spans, spans)] * len(self.plan.decoder)
        return self.decode(boundary, steps, rows, engram_rows)

    def block(self, layer_id: int) -> Block:
        """One layer."""
        return self._blocks[layer_id]

    def _run(
        self, boundary: Boundary, first: int, steps: Sequence[tuple[Spans, Spans]], rows: Rows,
        engram_rows: Tensor | None,
    ) -> Boundary:  # fmt: skip
        tables = RotaryTables(self.rotary)
        stream, pre = boundary
        for layer_id, (spans, queries) in enumerate(steps, start=first):
            block = self.block(layer_id)
            if block.engram is not None:
                if engram_rows is None:
                    raise ValueError(
                        f"layer {layer_id} has an Engram but no n-gram rows were given"
                    )
                stream = block.engram(stream, engram_rows)
            stream, pre = block(stream, pre, spans, queries, rows, tables)
        return Boundary(stream, pre)
