"""Every instruction-set variant of the compiled kernels in turn: as a library, and as operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cedar.kernels.native.library import NativeLibrary, load
from cedar.kernels.native.operators import NativeOperators

LIBRARY = load().library


@pytest.fixture(params=[] if LIBRARY is None else LIBRARY.available_isas(), scope="module")
def native_library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    """The library, held to one variant; no test runs where it was not built."""
    assert LIBRARY is not None
    LIBRARY.set_isa(request.param)
    yield LIBRARY
    LIBRARY.set_isa("auto")


@pytest.fixture(scope="module")
def native(native_library: NativeLibrary) -> NativeOperators:
    """The operators on it."""
    return NativeOperators(native_library)
