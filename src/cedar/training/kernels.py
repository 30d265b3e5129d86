"""The pieces of a training step, compiled or not: one object per run, handed to whoever needs it.

Compilation needs a C++ compiler at run time; `Kernels(compiled=False)` gives the same functions in
plain torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from cedar.training import fused, pieces


def compiler_available() -> bool:
    """Whether a C++ compiler that `torch.compile` can use is on the path."""
    return any(shutil.which(name) for name in ("g++", "clang++"))


class Kernels:
    """Functions of `pieces` and `fused` as attributes, compiled for fixed shapes if asked."""

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled

        def prepared(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True) if compiled else function

        if compiled:
            torch._dynamo.config.recompile_limit = 64
        self.rms_norm = prepared(pieces.rms_norm)
        self.rotate = prepared(pieces.rotate)
        self.swiglu = prepared(pieces.swiglu)
        self.swiglu_grad = prepared(pieces.swiglu_grad)
        self.joint_softmax = prepared(pieces.joint_softmax)
        self.softmax_grad = prepared(pieces.softmax_grad)
        self.cross_entropy = prepared(pieces.cross_entropy)
        self.enter = prepared(fused.enter)
        self.seam = prepared(fused.seam)
        self.leave = prepared(fused.leave)
