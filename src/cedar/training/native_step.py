"""Compiles and binds `native/step.cpp`: the memory-bound parts of a step as single passes.

Optional: needs a C++ compiler at run time, bfloat16 activations and four hyper-connection copies.
Without it `Kernels` uses the same functions in torch. Called by `kernels.py` and
`blocked_attention.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.training.fused import HyperShape, HyperWeights, Sublayer

_SOURCE = Path(__file__).parent / "native" / "step.cpp"
_FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-fopenmp", "-shared",
    "-fPIC", "-std=c++17",
)  # fmt: skip
_LIBRARIES = ("-lmvec", "-lm")


def build(compiler: str, cache: Path) -> Path:
    """Compile the library once per source, flags and compiler; returns its path."""
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join((compiler, *_FLAGS)).encode()).hexdigest()
    target = cache / f"cedar-step-{key[:16]}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(temporary), *_LIBRARIES]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(temporary, target)
    return target


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    if x is None:
        return ctypes.c_void_p(None)
    assert x.is_contiguous()
    return ctypes.c_void_p(x.data_ptr())


class NativeStep:
    """The library's functions, as tensors in, tensors out."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))

    def seam(self, y: Tensor, done: Sublayer, weights: HyperWeights, shape: HyperShape) -> Sublayer:
        """As `fused.seam`."""
        parts = _Seam.apply(
            y, done.stream, done.mix, weights.fn, weights.base, weights.scale, weights.norm, shape,
            self,
        )  # fmt: skip
        return Sublayer(*parts)

    def seam_forward(
        self, y: Tensor, stream: Tensor, mix: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New stream, normed input, inverse norm of the stream rows and of the collapsed rows."""
        rows, _, width = stream.shape
        out, u = torch.empty_like(stream), torch.empty_like(y)
        rho, r = mix.new_empty(rows), mix.new_empty(rows)
        self._lib.seam_forward(
            *map(_pointer, (y, stream, mix, norm, out, u, rho, r)), ctypes.c_int64(rows),
            ctypes.c_int64(width), ctypes.c_float(eps),
        )  # fmt: skip
        return out, u, rho, r

    def mixes(
        self, raw: Tensor, rho: Tensor, base: Tensor, scale: Tensor, shape: HyperShape
    ) -> Tensor:
        """Coefficients `[N, 24]`."""
        mix = rho.new_empty(raw.shape)
        self._lib.mixes_forward(
            *map(_pointer, (raw, rho, base, scale, mix)), ctypes.c_int64(raw.shape[0]),
            ctypes.c_int(shape.iters), ctypes.c_float(shape.eps),
        )  # fmt: skip
        return mix

    def mixes_backward(
        self, raw: Tensor, rho: Tensor, base: Tensor, scale: Tensor, grad: Tensor, shape: HyperShape
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients in raw, rho, base, scale."""
        grads = (
            torch.empty_like(raw),
            torch.empty_like(rho),
            torch.empty_like(base),
            torch.empty_like(scale),
        )
        self._lib.mixes_backward(
            *map(_pointer, (raw, rho, base, scale, grad, *grads)), ctypes.c_int64(raw.shape[0]),
            ctypes.c_int(shape.iters), ctypes.c_float(shape.eps),
        )  # fmt: skip
        return grads

    def seam_backward(
        self, saved: tuple[Tensor, ...], d_out: Tensor, d_flat: Tensor, d_rho: Tensor, d_u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients in y, stream, mix, norm; `saved` = y, stream, mix, norm, out, rho, r."""
        y, stream, mix, norm = saved[:4]
        grads = (
            torch.empty_like(y),
            torch.empty_like(stream),
            torch.empty_like(mix),
            torch.empty_like(norm),
        )
        rows, _, width = stream.shape
        self._lib.seam_backward(
            *map(_pointer, (*saved, d_out, d_flat, d_rho, d_u, *grads)), ctypes.c_int64(rows),
            ctypes.c_int64(width),
        )  # fmt: skip
        return grads

    def softmax(
        self, near: Tensor, far: Tensor | None, mask: Tensor | None, seen: Tensor, sink: Tensor,
        p_sink: Tensor, *, heads: int, window: int, first_block: int, scale: float,
    ) -> None:  # fmt: skip
        """Scores to probabilities in place, for consecutive queries of one sequence.

        Args:
            near: bfloat16 `[q * H, 2 W]`.   far: bfloat16 `[q * H, b]`.   mask: bool `[q, >= b]`.
            seen: int32 `[q]`.   p_sink: float32 `[q * H]`, written.
        """
        width = 0 if far is None else far.shape[1]
        stride = 0 if mask is None else mask.stride(0)
        first = ctypes.c_void_p(None if mask is None else mask.data_ptr())
        self._lib.softmax_forward(
            _pointer(near), _pointer(far), first, ctypes.c_int64(stride), _pointer(seen),
            _pointer(sink), _pointer(p_sink), ctypes.c_int64(near.shape[0] // heads),
            ctypes.c_int64(heads), ctypes.c_int64(window), ctypes.c_int64(first_block),
            ctypes.c_int64(width), ctypes.c_float(scale),
        )  # fmt: skip

    def softmax_backward(self, p: Tensor, grad: Tensor, dot: Tensor, scale: float) -> None:
        """`grad = p * (grad - dot) * scale` in place, rows first."""
        self._lib.softmax_backward(
            _pointer(p), _pointer(grad), _pointer(dot), ctypes.c_int64(p.shape[0]),
            ctypes.c_int64(p.shape[1]), ctypes.c_float(scale),
        )  # fmt: skip


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, stream: Tensor, mix: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
        norm: Tensor, shape: HyperShape, native: NativeStep,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        y = y.contiguous()
        out, u, rho, r = native.seam_forward(y, stream, mix, norm, shape.norm_eps)
        narrow = fn.to(out.dtype)
        raw = out.flatten(1) @ narrow.t()
        new_mix = native.mixes(raw, rho, base, scale, shape)
        ctx.save_for_backward(y, stream, mix, norm, out, rho, r, raw, narrow, base, scale)
        ctx.shape, ctx.native = shape, native
        return out, u, new_mix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_u: Tensor, d_mix: Tensor) -> tuple[Tensor | None, ...]:
        *saved, raw, narrow, base, scale = ctx.saved_tensors
        out, rho = saved[4], saved[5]
        d_raw, d_rho, d_base, d_scale = ctx.native.mixes_backward(
            raw, rho, base, scale, d_mix.contiguous(), ctx.shape
        )
        d_fn = (d_raw.t() @ out.flatten(1)).float()
        d_flat = d_raw @ narrow
        d_y, d_stream, d_done, d_norm = ctx.native.seam_backward(
            tuple(saved), d_out.contiguous(), d_flat, d_rho, d_u.contiguous()
        )
        return d_y, d_stream, d_done, d_fn, d_base, d_scale, d_norm, None, None
