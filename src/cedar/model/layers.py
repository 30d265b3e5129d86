"""The two building blocks every layer is made of: RMSNorm and (quantised) Linear.

Parameter names follow the released checkpoint: `weight`, and `scale` beside a quantised weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.types import WeightDtype
from cedar.kernels.operators import Operators, Weight


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float, ops: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps, self._ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)


class Linear(nn.Module):
    """A projection without bias, plain or with packed weights.

    Args:
        out, inp: output and input width.
        dtype: bf16 (trainable, any float dtype), fp8 or fp4 (packed, with a scale).
    """

    def __init__(self, out: int, inp: int, dtype: WeightDtype, ops: Operators) -> None:
        super().__init__()
        self._ops = ops
        if dtype == "bf16":
            self.weight = nn.Parameter(torch.empty(out, inp))
            self.scale = None
            return
        if dtype == "fp8":
            values = torch.empty(out, inp, dtype=torch.float8_e4m3fn)
            scale = torch.empty(-(-out // 32), -(-inp // 32), dtype=torch.float8_e8m0fnu)
        else:
            values = torch.empty(out, inp // 2, dtype=torch.int8)
            scale = torch.empty(out, inp // 32, dtype=torch.float8_e8m0fnu)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    @property
    def packed(self) -> Weight:
        """The weight as the operators take it."""
        return Weight(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed)
