"""Choice of a kernel backend by name. Called when a model is loaded."""

from __future__ import annotations

import logging

from cedar.errors import UsageError
from cedar.kernels.native.library import load
from cedar.kernels.native.operators import NativeOperators
from cedar.kernels.operators import Operators
from cedar.kernels.reference import ReferenceOperators

logger = logging.getLogger(__name__)


def select_operators(name: str) -> Operators:
    """The operators for `kernels=name`.

    Args:
        name: auto (native if it was built, else reference), native or reference.

    Raises:
        UsageError: the name is unknown, or native was asked for and is not there.
    """
    if name not in ("auto", "native", "reference"):
        raise UsageError(f"kernels={name!r} is not a choice; allowed: auto, native, reference")
    if name == "reference":
        return ReferenceOperators()
    if name == "native":
        return native_operators()
    library, reason = load()
    if library is not None:
        return NativeOperators(library)
    logger.warning("using the reference operators: %s", reason)
    return ReferenceOperators()


def native_operators(isa: str | None = None) -> Operators:
    """The compiled operators.

    Args:
        isa: instruction set to hold the whole process to; None = the best this machine has.

    Raises:
        UsageError: they were not built, or the machine lacks the instruction set.
    """
    library, reason = load()
    if library is None:
        raise UsageError(f"native kernels are not available: {reason}")
    if isa is not None:
        library.set_isa(isa)
    return NativeOperators(library)
