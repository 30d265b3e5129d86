"""Build hook: compiles the native kernels into the package, for wheels and editable installs.

Without a C++ compiler the install still succeeds; one line says that the reference operators will be
used. The compile itself is `src/cedar/kernels/native/build.py`, which needs only the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class NativeKernelsHook(BuildHookInterface[Any]):
    """Called by hatchling before it packs a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as belonging to this platform."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "src" / "cedar" / "kernels" / "native"
        native = _load(folder / "build.py")
        compiler = native.find_compiler(os.environ)
        if compiler is None:
            print(native.NO_COMPILER, file=sys.stderr)
            return
        try:
            library = native.build(compiler, folder)
        except native.BuildError as error:
            print(f"cedar: the native kernels did not compile: {error}", file=sys.stderr)
            print(native.NO_COMPILER, file=sys.stderr)
            return
        build_data["pure_python"] = False
        # The library is loaded through ctypes: it fits any Python, but only this platform.
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["force_include"][str(library)] = f"cedar/kernels/native/{library.name}"


def _platform_tag() -> str:
    """This platform as it calls itself; manylinux and musllinux promise what was not checked."""
    tags = (tag.platform for tag in sys_tags())
    return next(t for t in tags if not t.startswith(("manylinux", "musllinux")))


def _load(path: Path) -> ModuleType:
    """Import one file of the package that is about to be built."""
    spec = importlib.util.spec_from_file_location("cedar_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module
