"""The single-pass C++ of a training step against the same functions in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cedar.training import fused
from cedar.training.blocked_attention import BlockShape, blocked_attention, window_mask
from cedar.training.kernels import Kernels, find_compiler
from cedar.training.native_step import NativeStep, build

SHAPE = fused.HyperShape(copies=4, iters=6, eps=1e-6, norm_eps=1e-20)
WIDTH = 64


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeStep:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    return NativeStep(build(compiler, tmp_path_factory.mktemp("step")))


def _relative(one: Tensor, two: Tensor) -> float:
    return float((one.detach().float() - two.detach().float()).norm() / one.detach().float().norm())


def _seam_run(kernels: Kernels, rows: int) -> dict[str, Tensor]:
    """Outputs and all gradients of one seam on fixed random inputs."""
    random = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    weights = fused.HyperWeights(
        (made(24, 4 * WIDTH) * 0.1).requires_grad_(), made(24).requires_grad_(),
        made(3).requires_grad_(), made(WIDTH).requires_grad_(),
    )  # fmt: skip
    y = made(rows, WIDTH).bfloat16().requires_grad_()
    stream = made(rows, 4, WIDTH).bfloat16().requires_grad_()
    mix = torch.rand(rows, 24, generator=random).requires_grad_()
    done = fused.Sublayer(stream, y, mix)
    out = kernels.seam(y, done, weights, SHAPE)
    torch.autograd.backward(list(out), [made(*part.shape).to(part.dtype) for part in out])
    grads = dict(zip(("fn", "base", "scale", "norm"), (w.grad for w in weights), strict=True))
    return {
        **dict(zip(("stream", "u", "mix"), out, strict=True)),
        **{name: grad for name, grad in grads.items() if grad is not None},
        **{f"d_{n}": t.grad for n, t in (("y", y), ("stream", stream), ("mix", mix))
           if t.grad is not None},
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_the_fused_seam_and_its_gradients_equal_torch(native: NativeStep, rows: int) -> None:
    expected = _seam_run(Kernels(), rows)
    got = _seam_run(Kernels(native=native), rows)
    assert expected.keys() == got.keys()
    assert len(got) == 10
    for name, value in expected.items():
        # Gradients that pass through bfloat16 differ in its last bit; the rest in float32's.
        tolerance = 6e-3 if name.startswith("d_") or value.dtype == torch.bfloat16 else 2e-5
        assert _relative(value, got[name]) < tolerance, name


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_attention_without_the_invisible_triangle_equals_the_masked_one(
    native: NativeStep, ratio: int
) -> None:
    shape = BlockShape(batch=2, length=384, heads=3, window=64, scale=32**-0.5)
    results = []
    for kernels in (Kernels(), Kernels(native=native)):
        random = torch.Generator().manual_seed(2)
        q, near, far = (
            torch.randn(s, generator=random).bfloat16().requires_grad_()
            for s in ((2, 384, 3, 32), (2, 384, 32), (2, 384 // max(1, ratio), 32))
        )
        sink = torch.randn(3, generator=random).requires_grad_()
        seen = ((torch.arange(384) + 1) // max(1, ratio)).int()
        mask = torch.arange(far.shape[1]) < seen.unsqueeze(1)
        mask = mask & (torch.rand(2, *mask.shape, generator=random) > 0.5)
        out = blocked_attention(
            q, near, far if ratio else None, sink, window_mask(shape), mask if ratio else None, seen,
            shape, kernels,
        )  # fmt: skip
        out.backward(torch.randn(out.shape, generator=random).bfloat16())  # type: ignore[no-untyped-call]
        results.append([out, q.grad, near.grad, sink.grad] + ([far.grad] if ratio else []))
    for one, two in zip(*results, strict=True):
        assert one is not None and two is not None
        assert _relative(one, two) < 6e-3


def test_the_library_is_built_once_per_source(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    first = build(compiler, tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build(compiler, tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [first]
