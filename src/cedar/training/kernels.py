"""The pieces of a training step, compiled or not: one object per run, handed to whoever needs it.

Compilation needs a C++ compiler at run time; `Kernels()` gives the same functions in plain torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.training import fused, pieces, rounding
from cedar.training.native_step import NativeStep


def find_compiler() -> str | None:
    """The C++ compiler that `torch.compile` and `native_step` would use, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


class Kernels:
    """Functions of `pieces` and `fused` as attributes, compiled for fixed shapes if asked.

    Args:
        compiled: use `torch.compile`.   native: single-pass C++ for seams and softmax; only for
            bfloat16 activations and four copies.
    """

    def __init__(self, *, compiled: bool = False, native: NativeStep | None = None) -> None:
        self.native = native
        if compiled:
            # One function serves tensors of many shapes, each compiled once.
            torch._dynamo.config.recompile_limit = 64

        def prepared(function: Callable[..., Any]) -> Callable[..., Any]:
            if not compiled:
                return function
            return torch.compile(function, dynamic=False, fullgraph=True)

        self.rms_norm = prepared(pieces.rms_norm)
        self.rotate = prepared(pieces.rotate)
        self.swiglu = prepared(pieces.swiglu)
        self.swiglu_grad = prepared(pieces.swiglu_grad)
        self.joint_softmax = prepared(pieces.joint_softmax)
        self.softmax_grad = prepared(pieces.softmax_grad)
        self.cross_entropy = prepared(pieces.cross_entropy)
        self.fake_fp4 = prepared(rounding.fake_fp4)
        self.fake_fp8_tiles = prepared(rounding.fake_fp8_tiles)
        self.fake_act = prepared(rounding.fake_act)
        self.enter = prepared(fused.enter)
        self.seam = prepared(fused.seam) if native is None else native.seam
        self.leave = prepared(fused.leave)

    def through_act(self, x: Tensor) -> Tensor:
        """`fake_act` whose gradient passes unchanged."""
        rounded = _StraightThrough.apply(x, self.fake_act, x.dtype)
        assert isinstance(rounded, Tensor)
        return rounded

    def through_fp4(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A master `[out, in]` as its packed FP4 values in `dtype`; the gradient passes unchanged."""
        rounded = _StraightThrough.apply(weight, self.fake_fp4, dtype)
        assert isinstance(rounded, Tensor)
        return rounded

    def through_fp8(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A master `[out, in]` as its tiled FP8 values in `dtype`; the gradient passes unchanged."""
        rounded = _StraightThrough.apply(weight, self.fake_fp8_tiles, dtype)
        assert isinstance(rounded, Tensor)
        return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        ctx.dtype = x.dtype
        return function(x).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None
