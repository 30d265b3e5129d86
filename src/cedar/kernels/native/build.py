"""Compiles the C++ kernels into one shared library next to this file: `python -m cedar.kernels.native.build`.

Every kernel file is compiled once per instruction-set variant, everything else once; which variant a
call uses is decided at run time (`src/dispatch.cpp`). Imports only the standard library, because the
installer's build hook runs this file before the package or its dependencies are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NO_COMPILER = (
    "cedar: no C++ compiler found, native kernels not built; the reference operators will be used "
    "(slower, same results). Install g++ or clang++, or `pip install ziglang`, then run "
    "`python -m cedar.kernels.native.build`."
)

SOURCE_DIR = Path(__file__).resolve().parent / "src"

#: Flags of every file. Contraction is off because results must not depend on the compiler.
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden",
    "-pthread",
)  # fmt: skip

_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16",
    "-mavx512vbmi",
)  # fmt: skip
_AMX = (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8")

#: Variant name -> flags on x86-64; `available()` in dispatch.cpp asks the processor for the same.
X86_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "scalar": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "amx": _AMX,
}
#: Other processors get the portable variant, which compilers vectorise for their baseline.
PORTABLE_VARIANTS: Mapping[str, tuple[str, ...]] = {"scalar": ()}

#: Compiled once, for the baseline instruction set.
_ONCE = (
    "dispatch.cpp", "exports.cpp", "exports_layer.cpp", "exports_model.cpp", "thread_pool.cpp",
)  # fmt: skip
#: Kernels that also have a variant for matrix tiles; the others stop at AVX-512.
_WITH_TILES = (
    "index_topk.cpp", "sparse_attention.cpp", "matmul.cpp", "linear.cpp", "moe.cpp", "project.cpp",
    "route.cpp",
)  # fmt: skip


class BuildError(Exception):
    """The compiler refused a file; the message holds the command and its output."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One object file to make: a source, the variant it is for (None = once) and extra flags."""

    source: Path
    variant: str | None
    flags: tuple[str, ...]

    def command(self, compiler: Sequence[str], out: Path) -> list[str]:
        """The compile command."""
        define = () if self.variant is None else (f"-DCEDAR_ISA={self.variant}",)
        return [
            *compiler,
            *COMMON_FLAGS,
            *self.flags,
            *define,
            "-c",
            str(self.source),
            "-o",
            str(out),
        ]


def library_name() -> str:
    """File name of the shared library on this system."""
    return "libcedar_native.dylib" if sys.platform == "darwin" else "libcedar_native.so"


def find_compiler(environ: Mapping[str, str]) -> list[str] | None:
    """The C++ compiler to use, as the start of a command line.

    In this order: the variable CXX; c++, g++, clang++ on PATH; the `ziglang` package. None when
    there is none. A CXX that does not exist counts as none: it was asked for by name.
    """
    path = environ.get("PATH")
    if asked := environ.get("CXX"):
        command = shlex.split(asked)
        return command if shutil.which(command[0], path=path) else None
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name, path=path):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        # Zig compiles for this very processor unless told otherwise; variants are chosen at run time.
        return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    return None


def plan_units(source_dir: Path, machine: str) -> list[Unit]:
    """All object files of the library for a processor family (as `platform.machine()` names it)."""
    is_x86 = machine.lower() in ("x86_64", "amd64")
    variants = X86_VARIANTS if is_x86 else PORTABLE_VARIANTS
    units = []
    for source in sorted(source_dir.glob("*.cpp")):
        if source.name in _ONCE:
            units.append(Unit(source, None, ()))
            continue
        for name, flags in variants.items():
            if name != "amx" or source.name in _WITH_TILES:
                units.append(Unit(source, name, flags))
    return units


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")


def build(compiler: Sequence[str], out_dir: Path) -> Path:
    """Compile and link the library.

    Args:
        compiler: from `find_compiler`.
        out_dir: where the library goes; it appears there whole or not at all.
    Returns: the library's path.
    Raises:
        BuildError: the compiler failed.
    """
    units = plan_units(SOURCE_DIR, platform.machine())
    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / library_name()
    with tempfile.TemporaryDirectory(prefix="cedar-build-", dir=out_dir) as scratch:
        objects = [Path(scratch) / f"{u.source.stem}.{u.variant or 'once'}.o" for u in units]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [u.command(compiler, o) for u, o in zip(units, objects, strict=True)]
            list(pool.map(_run, commands))
        linked = Path(scratch) / target.name
        _run([*compiler, "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        linked.replace(target)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when the library was built, 1 when not."""
    parser = argparse.ArgumentParser(
        prog="python -m cedar.kernels.native.build", description=__doc__
    )
    parser.add_argument(
        "--out", type=Path, default=SOURCE_DIR.parent, help="directory of the library"
    )
    out_dir: Path = parser.parse_args(arguments).out
    compiler = find_compiler(os.environ)
    if compiler is None:
        print(NO_COMPILER, file=sys.stderr)
        return 1
    start = time.monotonic()
    try:
        target = build(compiler, out_dir)
    except BuildError as error:
        print(f"cedar: the native kernels did not compile: {error}", file=sys.stderr)
        return 1
    print(f"cedar: built {target} in {time.monotonic() - start:.1f} s with {shlex.join(compiler)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
