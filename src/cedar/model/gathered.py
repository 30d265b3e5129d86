"""`Gathered`: a value made from parameters once and kept until one of them is another tensor.

Layers keep the weights of their operator chains in it: gathering them through module attributes takes
longer than a decode step of the layer may. Called by `block.py`, `attention.py` and `indexer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from torch import nn

Value = TypeVar("Value")


class Gathered(Generic[Value]):
    """Calls `make` again when a parameter was replaced, moved or converted.

    Args:
        modules: whose own parameters (not those of children) the value is made from.
        make: makes the value.
    """

    def __init__(self, modules: Iterable[nn.Module], make: Callable[[], Value]) -> None:
        # The tables themselves: `parameters()` walks and checks at every call.
        self._tables = [module._parameters for module in modules]
        self._make = make
        self._made: tuple[list[int], Value] | None = None

    def get(self) -> Value:
        """The value."""
        addresses = [
            p.data_ptr() for table in self._tables for p in table.values() if p is not None
        ]
        # The old value keeps its tensors alive, so that no new one can have the old address.
        if self._made is None or self._made[0] != addresses:
            self._made = addresses, self._make()
        return self._made[1]
