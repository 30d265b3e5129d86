"""Machines: named ones with their datasheet, one given by hand, and the one this runs on.

FLOP/s are dense bf16 (half of a figure quoted "with sparsity"); memory sizes are powers of 1000 as
the vendors print them. Nothing here knows a model.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from cedar.errors import UsageError
from cedar.planner.ledger import Kind
from cedar.units import format_bytes

#: Assumed for every SSD: one 4 KiB random read alone, and reads a second with all in flight.
DISK_READ_SECONDS = 80e-6
DISK_READS_PER_SECOND = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a model would run.

    Attributes:
        name: how it is asked for.
        title: what it is.
        devices: equal accelerators, or 1 for a CPU; weights are split between them.
        memory_bytes, bandwidth, flops: of one device: B, B/s, dense bf16 FLOP/s.
        accelerator: whether `memory_bytes` is an accelerator's own memory.
        host_memory_bytes, host_bandwidth: RAM beside accelerators and how fast they read it.
        disk_bytes, disk_bandwidth: SSD that weights can be mapped from.
        kind, source: quoted from a datasheet (name, date), measured here, or given.
    """

    name: str
    title: str
    devices: int = 1
    memory_bytes: int
    bandwidth: float
    flops: float
    accelerator: bool = True
    host_memory_bytes: int = 0
    host_bandwidth: float = 64e9
    disk_bytes: int = 0
    disk_bandwidth: float = 6e9
    kind: Kind = "quoted"
    source: str

    @property
    def summary(self) -> str:
        """One line: devices, memory, RAM, SSD."""
        count = f"{self.devices} x " if self.devices > 1 else ""
        parts = [
            f"{count}{format_bytes(self.memory_bytes, 0)} {'GPU' if self.accelerator else 'RAM'}"
        ]
        if self.host_memory_bytes:
            parts.append(f"{format_bytes(self.host_memory_bytes, 0)} RAM")
        if self.disk_bytes:
            parts.append(f"{format_bytes(self.disk_bytes, 0)} SSD")
        return f"{self.title}: {', '.join(parts)}"


def _gpu(
    name: str, title: str, memory: float, bandwidth: float, flops: float, source: str
) -> Machine:
    return Machine(
        name=name,
        title=title,
        memory_bytes=int(memory * 1e9),
        bandwidth=bandwidth * 1e12,
        flops=flops * 1e12,
        source=source,
    )


def machines() -> dict[str, Machine]:
    """Named machines: single accelerators, whole DGX systems, one CPU server."""
    sparse = "half of the figure with sparsity"
    a100 = _gpu("a100", "NVIDIA A100 80GB SXM", 80, 2.039, 312,
                "NVIDIA A100 Tensor Core GPU datasheet, June 2021")  # fmt: skip
    h100 = _gpu("h100", "NVIDIA H100 SXM", 80, 3.35, 989.5,
                f"NVIDIA H100 Tensor Core GPU datasheet, April 2023; {sparse}")  # fmt: skip
    h200 = _gpu("h200", "NVIDIA H200 SXM", 141, 4.8, 989.5,
                f"NVIDIA H200 Tensor Core GPU datasheet, November 2023; {sparse}")  # fmt: skip
    b200 = _gpu("b200", "NVIDIA B200 SXM", 180, 8.0, 2250,
                f"NVIDIA DGX B200 datasheet, 2024, an eighth of it; {sparse}")  # fmt: skip
    mi300x = _gpu("mi300x", "AMD Instinct MI300X", 192, 5.3, 1307.4,
                  "AMD Instinct MI300X data sheet, December 2023")  # fmt: skip
    rtx4090 = _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24, 1.008, 165.2,
                   "NVIDIA Ada GPU architecture whitepaper, 2022; fp32 sums")  # fmt: skip
    rtx5090 = _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 32, 1.792, 209.5,
                   "NVIDIA RTX Blackwell whitepaper, January 2025; fp32 sums")  # fmt: skip
    epyc = Machine(
        name="epyc-9654x2",
        title="2 x AMD EPYC 9654, 24 x 64 GB DDR5-4800",
        memory_bytes=int(1.536e12),
        bandwidth=2 * 460.8e9,
        flops=2 * 96 * 2.4e9 * 64,
        accelerator=False,
        disk_bytes=int(7.68e12),
        source="AMD EPYC 9004 series data sheet, November 2022: 460.8 GB/s a socket; FLOP/s = 192 "
        "cores x 2.4 GHz x 64 (AVX-512 BF16); DIMMs and one 7.68 TB SSD assumed",
    )
    singles = [a100, h100, h200, b200, mi300x, rtx4090, rtx5090, epyc]
    # 8 x 3.84 TB of data cache; host link counted as one PCIe 5.0 x16 a GPU (64 GB/s).
    systems = [
        replace(
            gpu, name=f"dgx-{gpu.name}", title=f"NVIDIA DGX {gpu.name.upper()}", devices=8,
            host_memory_bytes=int(2e12), host_bandwidth=64e9, disk_bytes=int(30.72e12),
            disk_bandwidth=25e9,
            source=f"{gpu.source}; DGX {gpu.name.upper()} user guide, 2024: RAM and SSD sizes; "
            f"25 GB/s from the SSDs and 64 GB/s a link assumed",
        )
        for gpu in (h100, h200, b200)
    ]  # fmt: skip
    return {machine.name: machine for machine in (*singles, *systems)}


def find_machine(name: str) -> Machine:
    """A named machine, or several of one accelerator: "h200", "8xh200", "dgx-h200", "this".

    Raises:
        UsageError: the name is unknown; the message lists the known ones.
    """
    if name == "this":
        return this_machine()
    known = machines()
    match = re.fullmatch(r"(\d{1,3})x(.+)", name)
    count, single = (int(match[1]), match[2]) if match else (1, name)
    if single not in known or count < 1:
        raise UsageError(
            f"unknown machine {name!r}; allowed: this, {', '.join(known)}, and a count of 1 to "
            f"999 before an accelerator, like 8xh200; or give --memory, --bandwidth and --flops"
        )
    machine = known[single]
    if count == 1:
        return machine
    if machine.devices > 1 or not machine.accelerator:
        raise UsageError(f"{name!r}: only single accelerators can be counted, like 8xh200")
    return replace(machine, name=name, title=f"{count} x {machine.title}", devices=count)


def this_machine(root: Path = Path("/"), *, bandwidth: float | None = None) -> Machine:
    """The machine this runs on: RAM and cores from /proc, cgroup limits respected.

    Args:
        root: where /proc and /sys lie.
        bandwidth: B/s of RAM; measured by copying when None.

    Raises:
        UsageError: there is no /proc/meminfo to read.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="utf-8")
        cpuinfo = (root / "proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        raise UsageError(
            "this machine has no /proc to read; give --memory, --bandwidth and --flops instead"
        ) from None
    memory = min(_meminfo_bytes(meminfo), _cgroup_limit(root))
    cores, clock, per_cycle = _cpu(cpuinfo)
    measured = copy_bandwidth() if bandwidth is None else bandwidth
    disk = shutil.disk_usage(Path.cwd()).free
    return Machine(
        name="this",
        title=f"this machine, {cores} core" + ("s" if cores > 1 else ""),
        memory_bytes=memory,
        bandwidth=measured,
        flops=cores * clock * per_cycle,
        accelerator=False,
        disk_bytes=disk,
        disk_bandwidth=1e9,
        kind="measured",
        source=f"/proc: memory, cores; bandwidth by copying; FLOP/s = {cores} cores x "
        f"{clock / 1e9:.2f} GHz x {per_cycle} a cycle; SSD assumed at 1 GB/s",
    )


def _meminfo_bytes(meminfo: str) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    if match is None:
        raise UsageError("/proc/meminfo has no MemTotal; give --memory instead")
    return int(match[1]) * 1024


def _cgroup_limit(root: Path) -> int:
    """Memory limit of the container, or a huge number."""
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = (root / path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return 1 << 62


def _cpu(cpuinfo: str) -> tuple[int, float, int]:
    """Usable cores, clock in Hz, and bf16 or fp32 FLOPs a cycle of the widest unit it names."""
    clocks = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)]
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    per_cycle = 4
    for flag, flops in (("avx2", 32), ("avx512f", 32), ("avx512_bf16", 64), ("amx_bf16", 1024)):
        per_cycle = flops if flag in flags else per_cycle
    listed = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or 1
    cores = min(listed, len(os.sched_getaffinity(0)))
    return cores, max(clocks, default=2000.0) * 1e6, per_cycle


def copy_bandwidth(size: int = 64 * 2**20, repeats: int = 3) -> float:
    """Bytes read and written a second by copying `size` bytes, best of `repeats`; one thread."""
    source = bytearray(size)
    target = bytearray(size)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - begin)
    return 2 * size / best
