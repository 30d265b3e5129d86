"""Kernel benchmark: every native operator against its reference operator, and against the ceiling.

Called by `cedar bench kernels`. A and B are checked to agree before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cedar.bench.ceilings import Ceilings, measure_ceilings
from cedar.bench.measure import Ratio, interleave
from cedar.formats.codec import encode_fp4_weight, encode_fp8_weight
from cedar.formats.rows import RowFormat
from cedar.kernels.operators import (
    Expert,
    Operators,
    PagedRows,
    Routing,
    Selection,
    Weight,
    WindowRows,
)


@dataclass(frozen=True)
class Case:
    """One operator at one shape.

    Attributes:
        name, shape: what is printed.
        run: the work, given a backend.
        agree: whether two results agree.
        flops, read_bytes: work of one run; the one that is not 0 is held against its ceiling.
    """

    name: str
    shape: str
    run: Callable[[Operators], object]
    agree: Callable[[Any, Any], bool]
    flops: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True)
class KernelResult:
    """One case timed."""

    case: Case
    ratio: Ratio
    ceilings: Ceilings

    @property
    def fraction(self) -> float | None:
        """Share of the ceiling of its kind; None for work that is bound by neither."""
        if self.case.flops:
            return self.case.flops / self.ratio.a_seconds / self.ceilings.bf16_flops
        if self.case.read_bytes:
            return self.case.read_bytes / self.ratio.a_seconds / self.ceilings.read_bytes
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "operator": self.case.name,
            "shape": self.case.shape,
            "fraction_of_ceiling": self.fraction,
            "ceiling": "bf16_gemm" if self.case.flops else "memory_read",
            "ceilings": self.ceilings.to_dict(),
            **self.ratio.to_dict(),
        }


def run_cases(native: Operators, reference: Operators, *, rounds: int) -> Iterator[KernelResult]:
    """Time every case; the ceilings are measured anew beside each.

    Raises:
        RuntimeError: native and reference disagree; such a timing would mean nothing.
    """
    for case in kernel_cases():
        if not case.agree(case.run(native), case.run(reference)):
            raise RuntimeError(f"{case.name} {case.shape}: native and reference disagree")
        ceilings = measure_ceilings()
        ratio = interleave(
            lambda case=case: case.run(native),  # type: ignore[misc]
            lambda case=case: case.run(reference),  # type: ignore[misc]
            rounds=rounds,
        )
        yield KernelResult(case, ratio, ceilings)


def kernel_cases() -> Iterator[Case]:
    """All cases, cheap ones first within an operator."""
    yield from _index_cases()
    yield from _attention_cases()
    yield from _projection_cases()
    yield from _moe_cases()
    yield from _codec_cases()
    yield from _glue_cases()


def _close(relative: float) -> Callable[[Any, Any], bool]:
    def agree(a: Any, b: Any) -> bool:
        first = a[0] if isinstance(a, tuple) else a
        second = b[0] if isinstance(b, tuple) else b
        difference = (first.float() - second.float()).abs().max()
        return bool(difference <= relative * second.float().abs().max())

    return agree


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a.positions, b.positions) if isinstance(a, Selection) else torch.equal(a, b)


def _paged(rows: Tensor, fmt: RowFormat) -> PagedRows:
    return PagedRows(rows, torch.zeros(1, 1, dtype=torch.int32), rows.shape[0], fmt)


def _random_rows(count: int, fmt: RowFormat, reference: Operators) -> Tensor:
    return reference.pack_rows(torch.randn(count, fmt.width), fmt)


def _index_cases() -> Iterator[Case]:
    from cedar.kernels.reference import ReferenceOperators

    reference = ReferenceOperators()
    for queries, keys, heads, width in ((512, 8192, 8, 64), (512, 8192, 4, 32), (1, 32768, 8, 64)):
        fmt = RowFormat("index", width)
        packed = reference.pack_rows(torch.randn(queries, heads, width), fmt)
        weights = torch.randn(queries, heads)
        paged = _paged(_random_rows(keys, fmt, reference), fmt)
        sequences = torch.zeros(queries, dtype=torch.int32)
        visible = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32)

        def run(ops: Operators, args: Any = (packed, weights, paged, sequences, visible)) -> object:
            return ops.index_topk(*args, topk=512)

        yield Case(
            "index_topk", f"{queries} x {keys} keys, {heads} x {width}", run, _equal,
            flops=2.0 * float(visible.sum()) * heads * width,
        )  # fmt: skip


def _attention_cases() -> Iterator[Case]:
    from cedar.kernels.reference import ReferenceOperators

    reference = ReferenceOperators()
    for queries, heads, width in ((256, 8, 128), (256, 16, 512), (1, 8, 128), (1, 16, 512)):
        main, window = RowFormat("main", width), RowFormat("window", width)
        count, reach = 8192, 128
        paged = _paged(_random_rows(count, main, reference), main)
        near = _random_rows(queries + reach, window, reference)
        hi = torch.arange(queries, dtype=torch.int32) + reach
        view = WindowRows(
            near, torch.zeros(queries, dtype=torch.int64), hi - reach + 1, hi, 1 << 40, window
        )
        picks = torch.stack([torch.randperm(count)[:512].sort().values for _ in range(queries)])
        selection = Selection(picks.to(torch.int32))
        q = torch.randn(queries, heads, width, dtype=torch.bfloat16)
        sequences, sink = torch.zeros(queries, dtype=torch.int32), torch.randn(heads)

        def run(ops: Operators, args: Any = (q, view, paged, selection, sequences, sink),
                scale: float = width**-0.5) -> object:  # fmt: skip
            return ops.sparse_attention(*args, scale=scale)

        kind = "decode" if queries == 1 else "prefill"
        yield Case(
            f"sparse_attention {kind}", f"{queries} x 640 rows, {heads} x {width}", run, _close(0.02),
            flops=4.0 * queries * 640 * heads * width,
        )  # fmt: skip


def _projection_cases() -> Iterator[Case]:
    for side in (4096, 8192):
        quantised = encode_fp4_weight(torch.randn(side, side) * side**-0.5)
        weight = Weight(
            quantised.codes.view(torch.int8), quantised.scales.view(torch.float8_e8m0fnu)
        )
        x = torch.randn(1, side, dtype=torch.bfloat16)

        def run(ops: Operators, x: Tensor = x, weight: Weight = weight) -> object:
            return ops.linear(x, weight)

        size = side * side / 2 + side * side / 32
        yield Case("fp4 GEMV", f"{side} x {side}", run, _close(0.01), read_bytes=size)
    quantised = encode_fp8_weight(torch.randn(4096, 4096) / 64)
    weight = Weight(
        quantised.codes.view(torch.float8_e4m3fn), quantised.scales.view(torch.float8_e8m0fnu)
    )
    x = torch.randn(1, 4096, dtype=torch.bfloat16)
    yield Case(
        "fp8 GEMV", "4096 x 4096", lambda ops: ops.linear(x, weight), _close(0.01),
        read_bytes=4096 * 4096 * (1 + 1 / 1024),
    )  # fmt: skip


def _moe_cases() -> Iterator[Case]:
    width, inner, num_experts, chosen = 256, 256, 16, 2

    def expert() -> Expert:
        def matrix(out: int, inp: int) -> Weight:
            return Weight((torch.randn(out, inp) * inp**-0.5).to(torch.bfloat16))

        return Expert(matrix(inner, width), matrix(inner, width), matrix(width, inner))

    experts, shared = [expert() for _ in range(num_experts)], expert()
    for tokens in (4096, 1):
        x = torch.randn(tokens, width, dtype=torch.bfloat16)
        ids = torch.stack([torch.randperm(num_experts)[:chosen] for _ in range(tokens)])
        routing = Routing(ids, torch.rand(tokens, chosen))

        def run(ops: Operators, x: Tensor = x, routing: Routing = routing) -> object:
            return ops.moe(x, routing, experts, shared, limit=10.0)

        yield Case(
            "grouped MoE", f"{tokens} tokens, {num_experts} experts top-{chosen}, {width} wide", run,
            _close(0.02), flops=2.0 * 3 * width * inner * tokens * (chosen + 1),
        )  # fmt: skip


def _codec_cases() -> Iterator[Case]:
    rows, fmt = 1024, RowFormat("main", 512)
    x = torch.randn(rows, 512, dtype=torch.bfloat16)
    where = torch.randperm(rows)

    def quantise(ops: Operators) -> object:
        return ops.pack_rows(x, fmt)

    yield Case("quantise main rows", f"{rows} x 512", quantise, _equal, read_bytes=x.nbytes)
    from cedar.kernels.reference import ReferenceOperators

    packed = ReferenceOperators().pack_rows(x, fmt)

    def dequantise(ops: Operators) -> object:
        return ops.load_rows(packed, where, fmt)

    # The float32 result is written, the packed rows are read: both cross the memory bus.
    moved = packed.nbytes + rows * 512 * 4
    yield Case("gather + dequantise", f"{rows} x 512", dequantise, _equal, read_bytes=moved)


def _glue_cases() -> Iterator[Case]:
    fn, base, scale = torch.randn(24, 1024) / 32, torch.randn(24), torch.ones(3)
    for tokens in (2048, 1):
        stream = torch.randn(tokens, 4, 256, dtype=torch.bfloat16)

        def run(ops: Operators, stream: Tensor = stream) -> object:
            return ops.hc_mixes(stream, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-20)

        yield Case(
            "mHC mixes + Sinkhorn", f"{tokens} tokens, 4 x 256", run, _close(1e-4),
        )  # fmt: skip
