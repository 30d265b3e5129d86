"""Choice of a kernel backend by name. Called when a model is loaded."""

from __future__ import annotations

from cedar.errors import UsageError
from cedar.kernels.operators import Operators
from cedar.kernels.reference import ReferenceOperators


def select_operators(name: str) -> Operators:
    """The operators for `kernels=name`.

    Args:
        name: auto (the fastest that works here) or reference.

    Raises:
        UsageError: the name is unknown.
    """
    if name in ("auto", "reference"):
        return ReferenceOperators()
    raise UsageError(f"kernels={name!r} is not a choice; allowed: auto, reference")
