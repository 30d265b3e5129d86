"""The compiled kernels as a ctypes library: find it, check it, declare its functions. Imports no torch.

Called by the native operator set, which passes tensor addresses, and by `cedar bench` and tests for the
instruction-set variants. What the functions compute is described in the headers under `src/`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cedar.errors import UsageError
from cedar.kernels.native.build import library_name

#: Bumped together with `kAbiVersion` in exports.cpp whenever a signature changes.
ABI_VERSION = 3

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float}

#: Exported function (without `cedar_`) -> argument types: p pointer, i int32, q int64, f float32.
SIGNATURES = {
    "store_rows": "piqqiqpqqpi",
    "load_rows": "pqqpqiqpiqi",
    "fake_quantise": "piqqqpiqi",
    "linear": "piqqppiqqipiqi",
    "rms_norm": "piqqpifpi",
    "rotate": "piqqqpqipi",
    "hc_mixes": "piqqqpppiffpppi",
    "hc_collapse": "piqqqppifpi",
    "hc_expand": "ppiqqqpppi",
    "pool_groups": "ppqqqpi",
    "project": "piqqppiqipifpqqpi",
    "project_output": "piqqqpqqppiqppiqpi",
    "feed_forward": "pppiqppi",
    "project_attention": "ppiqpqpppi",
    "project_groups": "piqqqppippi",
    "attend_ring": "pppiipqqppppqpqpqippifpqpi",
    "layer_step": "pppiipqpqqppppqpqpqippifqpqpqippippiipppi",
    "select_rows": "pppiipqqpqpqippippiipi",
    "route": "piqqpipqqqiifppi",
    "moe": "piqqqqqppippppppippfpi",
    "index_topk": "pppqpqippiiiippiipi",
    "sparse_attention": "ppipqpppqpqpqippipfiiippi",
}

#: Meaning of a kernel's return value; `Status` in exports.cpp.
_STATUS = {
    1: "the row width is not a multiple of the values one scale covers",
    2: "a row number is outside the pool",
    3: "an unknown row kind, weight kind, dtype or scoring flag",
}


class LoadResult(NamedTuple):
    """A library, or None and the reason why there is none."""

    library: NativeLibrary | None
    reason: str


class NativeLibrary:
    """The loaded kernels. Safe to share between threads; holds no state but the chosen variant.

    Args:
        handle: the opened shared library, of the right ABI version.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle
        self._functions: dict[str, Callable[..., int]] = {}
        for name, types in SIGNATURES.items():
            function = getattr(handle, f"cedar_{name}")
            function.argtypes = [_TYPES[t] for t in types]
            function.restype = ctypes.c_int
            self._functions[name] = function
        handle.cedar_isa.restype = ctypes.c_char_p
        handle.cedar_set_isa.argtypes = [ctypes.c_char_p]

    def call(self, name: str, *arguments: int | float | ctypes.Array[Any] | None) -> None:
        """Run one kernel; pointers are integers (`tensor.data_ptr()`), arrays of them, or None.

        Raises:
            UsageError: the kernel refused the arguments.
        """
        status = self._functions[name](*arguments)
        if status != 0:
            why = _STATUS.get(status, f"status {status}")
            raise UsageError(f"native kernel {name} refused its arguments: {why}")

    @property
    def isa(self) -> str:
        """The instruction-set variant in use: scalar, avx2, avx512 or amx."""
        name: bytes = self._handle.cedar_isa()
        return name.decode()

    def set_isa(self, name: str) -> None:
        """Force a variant for the whole process, or `auto` for the best one.

        Raises:
            UsageError: this machine or this build does not have it.
        """
        if self._handle.cedar_set_isa(name.encode()) != 0:
            raise UsageError(
                f"instruction set {name!r} is not available here: allowed are "
                f"{', '.join(self.available_isas())} and auto"
            )

    def available_isas(self) -> list[str]:
        """Variants this machine can run, slowest first."""
        current = self.isa
        names = ("scalar", "avx2", "avx512", "amx")
        found = [n for n in names if self._handle.cedar_set_isa(n.encode()) == 0]
        self._handle.cedar_set_isa(current.encode())
        return found


def load(directory: Path | None = None) -> LoadResult:
    """Open the compiled kernels.

    Args:
        directory: where the library lies; default: next to this file, where the build puts it.
    """
    path = (directory or Path(__file__).resolve().parent) / library_name()
    rebuild = "run `python -m cedar.kernels.native.build`"
    if not path.is_file():
        return LoadResult(None, f"{path} does not exist: {rebuild}")
    try:
        handle = ctypes.CDLL(str(path))
        version = int(handle.cedar_abi_version())
    except (OSError, AttributeError) as error:
        return LoadResult(None, f"{path} cannot be loaded ({error}): {rebuild}")
    if version != ABI_VERSION:
        why = f"has ABI version {version}, this package needs {ABI_VERSION}"
        return LoadResult(None, f"{path} {why}: {rebuild}")
    return LoadResult(NativeLibrary(handle), "")
