"""The machine's own ceilings, measured beside what is compared with them: GEMM and memory read.

Called by the kernel benchmark. GEMM is torch's (oneDNN), the fastest dense product at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cedar.bench.measure import median_seconds

_SIDE = 2048
_READ_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do at the current thread count.

    Attributes:
        bf16_flops: of a 2,048-cubed product, FLOP/s, in the best instructions torch finds.
        read_bytes: sequential read of 256 MiB, bytes/s.
        threads: torch's thread count.
    """

    bf16_flops: float
    read_bytes: float
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "bf16_gemm_flops": self.bf16_flops,
            "memory_read_bytes_per_second": self.read_bytes,
            "threads": self.threads,
            "kind": "measured",
        }


def measure_ceilings() -> Ceilings:
    """Measure both, under a second."""

    a, b = torch.randn(2, _SIDE, _SIDE).to(torch.bfloat16)
    gemm = 2 * _SIDE**3 / median_seconds(lambda: a @ b)
    block = torch.zeros(_READ_BYTES // 8, dtype=torch.int64)
    read = _READ_BYTES / median_seconds(lambda: block.sum())
    return Ceilings(gemm, read, torch.get_num_threads())
