"""Engram: n-gram memory rows added to the stream entering a layer. Called by `causal_lm.py`.

Row numbers are a pure function of token ids (`config/engram_hash.py`); this file looks them up,
projects them and gates them per copy (specification 4.11 e, f).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layer_plan import LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.formats.codec import e4m3_decode, e8m0_decode
from cedar.kernels.operators import Operators
from cedar.model.layers import Linear

_DOT_FLOOR = 1e-6


class EngramTable(nn.Module):
    """Table rows in E4M3 with one power-of-two scale per 32 channels; quantised in every model."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        values = torch.empty(rows, width, dtype=torch.float8_e4m3fn)
        scale = torch.empty(rows, width // 32, dtype=torch.float8_e8m0fnu)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """`[N, columns]` row numbers to float32 `[N, columns, width]`; reads only those rows."""
        codes = self.weight.view(torch.uint8)[rows]
        scale = e8m0_decode(self.scale.view(torch.uint8)[rows])
        return (e4m3_decode(codes).unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)


class Engram(nn.Module):
    """The memory of one layer."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, ops: Operators) -> None:
        super().__init__()
        assert config.engram_head_dim and config.engram_n_heads and config.engram_max_ngram_size
        self._copies, self._width, self._eps = (
            config.hc_mult,
            config.hidden_size,
            config.rms_norm_eps,
        )
        self.slot = config.engram_layer_ids.index(spec.layer_id)
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embed = EngramTable(config.engram_num_embeddings[self.slot], config.engram_head_dim)
        out = (self._copies + 1) * self._width
        inputs = columns * config.engram_head_dim
        self.wkv = Linear(out, inputs, config.dense_dtype, ops)
        self.q_weight = nn.Parameter(torch.ones(self._copies, self._width))
        self.k_weight = nn.Parameter(torch.ones(self._copies, self._width))

    def forward(self, stream: Tensor, rows: Tensor) -> Tensor:
        """Add the gated memory to `stream [N, C, D]`.

        Args:
            rows: int64 `[N, layers, columns]` from `EngramHash.rows`.
        """
        memory = self.embed(rows[:, self.slot]).flatten(1).to(stream.dtype)
        projected = self.wkv(memory).float().unflatten(-1, (self._copies + 1, self._width))
        keys, value = projected[:, :-1], projected[:, -1:]
        wide = stream.float()
        dot = (wide * self.q_weight.float() * self.k_weight.float() * keys).sum(-1)
        dot = dot * torch.rsqrt(wide.square().mean(-1) + self._eps)
        dot = dot * torch.rsqrt(keys.square().mean(-1) + self._eps) * self._width**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=_DOT_FLOOR).sqrt(), dot))
        return (wide + gate.unsqueeze(-1) * value).to(stream.dtype)
