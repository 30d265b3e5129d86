"""Checkpoint reader and writer: safetensors, sharded or single, headers checked before any data.

`CheckpointReader` validates every tensor by name, shape and dtype against the weight schema from the
headers alone, then hands out memory-mapped tensors. Called by `cedar.loading`, `cli.inspect` and
training; the planner reads the same headers without torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cedar.config.weight_schema import TensorSpec
from cedar.formats.headers import check_headers, read_headers

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class CheckpointReader:
    """Open checkpoint: validated headers, lazily mapped tensors. A context manager.

    Args:
        path: model directory.
        schema: every tensor that must be there, and no other.
    """

    def __init__(self, path: Path, schema: Iterable[TensorSpec]) -> None:
        self.headers = read_headers(path)
        check_headers(self.headers, schema)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """One tensor, backed by the memory-mapped file."""
        file = self.headers[name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        tensor = self._files[file].get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `config.json`, weights and index into a directory, each file atomically.

    Args:
        tensors: released names; contiguous.
    """
    path.mkdir(parents=True, exist_ok=True)
    ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
    temporary = path / f".{SINGLE_NAME}.tmp"
    save_file(ordered, temporary, metadata={"format": "pt"})
    os.replace(temporary, path / SINGLE_NAME)
    size = sum(t.numel() * t.element_size() for t in ordered.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(ordered, SINGLE_NAME)}
    write_json(path / INDEX_NAME, index)
    write_json(path / "config.json", config)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(
        json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    os.replace(temporary, path)


def to_tag(tensor: Tensor) -> str:
    """safetensors dtype tag of a tensor."""
    return {
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.int8: "I8",
    }[tensor.dtype]
