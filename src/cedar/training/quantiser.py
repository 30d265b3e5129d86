"""Which weights the released format packs, and their straight-through values for one step.

Called by `trainer.py` in the anneal phase and by `export.py` (for the list).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import weight_schema
from cedar.training.kernels import Kernels
from cedar.training.operators import TrainingOperators

Packing = Literal["fp8", "fp4"]


def packed_weights(released: ModelConfig) -> dict[str, Packing]:
    """Name -> packing of every weight that the checkpoint of `released` stores packed."""
    tags: dict[str, Packing] = {"F8_E4M3": "fp8", "I8": "fp4"}
    return {
        spec.name: tags[spec.tag]
        for spec in weight_schema(released)
        if spec.tag in tags and spec.parameters and spec.part not in ("engram_tables", "draft")
    }


class WeightQuantiser:
    """Puts packed-format values of the masters before the operators, once per forward pass."""

    def __init__(
        self, model: nn.Module, released: ModelConfig, ops: TrainingOperators, kernels: Kernels
    ) -> None:
        parameters = dict(model.named_parameters())
        self._weights = [
            (parameters[name], packing) for name, packing in packed_weights(released).items()
        ]
        self._ops, self._kernels = ops, kernels

    def prepare(self, model_dtype: torch.dtype) -> None:
        """Round every packed weight; gradients reach the masters."""
        for parameter, packing in self._weights:
            through = self._kernels.through_fp4 if packing == "fp4" else self._kernels.through_fp8
            self._ops.prepared[id(parameter)] = through(parameter, model_dtype)

    def clear(self) -> None:
        """Back to plain masters."""
        self._ops.prepared.clear()
