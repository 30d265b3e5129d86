"""Building and finding the native kernels: with a compiler, without one, and with a broken one.

A script that only takes notes stands in for the compiler: what is tested is which files it is asked to
compile, where the result goes and what the user is told, not g++.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cedar.errors import UsageError
from cedar.kernels.native import build, library

ROOT = Path(__file__).resolve().parents[2]

#: Writes its arguments to a file and an output where -o says; fails on files named in FAKE_FAILS.
FAKE = """
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(" ".join(arguments) + "\\n")
if os.environ.get("FAKE_FAILS", "no such file") in " ".join(arguments):
    print("fake: no such instruction", file=sys.stderr)
    sys.exit(1)
Path(arguments[arguments.index("-o") + 1]).write_bytes(b"not a library")
"""


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler for CXX; returns its log."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", shlex.join([sys.executable, str(script)]))
    monkeypatch.setenv("FAKE_LOG", str(log))
    return log


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither CXX nor a compiler on PATH nor the ziglang package."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)


def executable(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_compiler_is_cxx_then_path_then_zig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zig = [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    environ = {"PATH": str(tmp_path)}
    assert build.find_compiler(environ) == zig
    clang = executable(tmp_path / "clang++")
    assert build.find_compiler(environ) == [clang]
    gcc = executable(tmp_path / "g++")
    assert build.find_compiler(environ) == [gcc]
    asked = executable(tmp_path / "my-cxx")
    assert build.find_compiler({**environ, "CXX": f"{asked} -v"}) == [asked, "-v"]


def test_a_compiler_asked_for_by_name_is_not_replaced_by_another(tmp_path: Path) -> None:
    executable(tmp_path / "g++")
    assert build.find_compiler({"PATH": str(tmp_path), "CXX": "no-such-compiler"}) is None


def test_without_a_compiler_one_line_says_so(
    no_compiler: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("cedar: no C++ compiler found, native kernels not built;")
    assert not (tmp_path / "out").exists()


def test_every_kernel_is_compiled_for_every_variant_and_the_rest_once(
    fake_compiler: Path, tmp_path: Path
) -> None:
    units = build.plan_units(build.SOURCE_DIR, "x86_64")
    sources = {p.name for p in build.SOURCE_DIR.glob("*.cpp")}
    assert {u.source.name for u in units} == sources
    by_variant = {
        name: {u.source.name for u in units if u.variant == name}
        for name in (None, "scalar", "avx2", "avx512", "amx")
    }
    once = by_variant.pop(None)
    assert {"dispatch.cpp", "exports.cpp", "thread_pool.cpp"} <= once
    for name in ("scalar", "avx2", "avx512"):
        assert by_variant[name] == sources - once
    assert "linear.cpp" in by_variant["amx"]
    assert by_variant["amx"] < sources - once

    assert build.main(["--out", str(tmp_path / "out")]) == 0
    lines = fake_compiler.read_text().splitlines()
    compiled = [line for line in lines if " -c " in line]
    assert len(compiled) == len(units)
    assert all("-ffp-contract=off" in line for line in compiled)
    assert sum("-shared" in line for line in lines) == 1
    wide = [line for line in compiled if "-mavx512bf16" in line]
    assert all("CEDAR_ISA=avx512" in line or "CEDAR_ISA=amx" in line for line in wide)


def test_other_processors_get_the_portable_variant_only() -> None:
    units = build.plan_units(build.SOURCE_DIR, "aarch64")
    assert {u.variant for u in units} == {None, "scalar"}
    assert not any(flag.startswith("-m") for u in units for flag in u.flags)


def test_the_library_replaces_an_older_one_only_when_it_is_whole(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    target = out / build.library_name()
    target.write_bytes(b"older")
    monkeypatch.setenv("FAKE_FAILS", "glue.cpp")
    assert build.main(["--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "did not compile" in said
    assert "glue.cpp" in said
    assert "no such instruction" in said
    assert [p.name for p in out.iterdir()] == [target.name]
    assert target.read_bytes() == b"older"
    monkeypatch.delenv("FAKE_FAILS")
    assert build.main(["--out", str(out)]) == 0
    assert [p.name for p in out.iterdir()] == [target.name]
    assert target.read_bytes() == b"not a library"


# ---- the binding ---------------------------------------------------------------------------------


def test_loading_says_why_there_is_no_library(tmp_path: Path) -> None:
    missing = library.load(tmp_path)
    assert missing.library is None
    assert "does not exist" in missing.reason
    assert "python -m cedar.kernels.native.build" in missing.reason
    (tmp_path / library.library_name()).write_bytes(b"not a library")
    broken = library.load(tmp_path)
    assert broken.library is None
    assert "cannot be loaded" in broken.reason


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" int cedar_abi_version() { return 0; }\n')
    out = tmp_path / library.library_name()
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(out)], check=True)
    old = library.load(tmp_path)
    assert old.library is None
    assert f"ABI version 0, this package needs {library.ABI_VERSION}" in old.reason


def declared_signatures() -> dict[str, str]:
    """Exported C functions and their parameter types, in the letters of library.SIGNATURES."""
    found = {}
    for path in build.SOURCE_DIR.glob("*.cpp"):
        for name, parameters in re.findall(
            r"CEDAR_API int cedar_(\w+)\(([^)]*)\) \{", path.read_text()
        ):
            letters = ""
            for parameter in (p.strip() for p in parameters.split(",") if p.strip()):
                plain = {"int32_t": "i", "int64_t": "q", "float": "f"}
                letters += "p" if "*" in parameter else plain[parameter.split()[0]]
            found[name] = letters
    return found


def test_declared_argument_types_are_those_of_the_sources() -> None:
    declared = declared_signatures()
    apart = {"abi_version", "set_isa"}  # bound by hand
    assert {n: t for n, t in declared.items() if n not in apart} == library.SIGNATURES


def test_the_abi_version_is_the_one_in_the_sources() -> None:
    text = (build.SOURCE_DIR / "exports.cpp").read_text()
    assert re.search(r"kAbiVersion = (\d+);", text).group(1) == str(library.ABI_VERSION)  # type: ignore[union-attr]


def test_variants_can_be_asked_for_and_forced() -> None:
    native, reason = library.load()
    if native is None:
        pytest.skip(reason)
    best = native.isa
    names = native.available_isas()
    assert names[0] == "scalar"
    assert native.isa == best
    try:
        for name in names:
            native.set_isa(name)
            assert native.isa == name
        with pytest.raises(UsageError, match="mmx"):
            native.set_isa("mmx")
    finally:
        native.set_isa("auto")
    assert native.isa == best


def test_the_binding_imports_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import cedar.kernels.native.library as l; "
        "print(l.load().reason or l.load().library.isa)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()


# ---- the installer's hook ------------------------------------------------------------------------


def build_wheel(tmp_path: Path, environ: dict[str, str]) -> tuple[str, list[str], str]:
    """Name and files of a wheel built from a copy of the sources, and what the build printed."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.safetensors", "assets")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=copy, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    return wheel.name, zipfile.ZipFile(wheel).namelist(), done.stderr


def test_a_wheel_built_with_a_compiler_holds_the_library_for_this_platform(
    fake_compiler: Path, tmp_path: Path
) -> None:
    pytest.importorskip("hatchling")
    name, files, _ = build_wheel(tmp_path, dict(os.environ))
    assert f"cedar/kernels/native/{build.library_name()}" in files
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")


def test_an_install_without_a_compiler_succeeds_and_says_one_line(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    environ = {**os.environ, "CXX": "no-such-compiler"}
    name, files, said = build_wheel(tmp_path, environ)
    assert name.endswith("-py3-none-any.whl")
    assert not any(file.endswith((".so", ".dylib")) for file in files)
    assert said.count("no C++ compiler found") == 1
    assert "reference operators will be used" in said
