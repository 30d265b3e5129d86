"""Damaging copies of a recorded checkpoint, and the refusal they must meet. No tests here."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import cedar
from cedar.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NORM = "layers.0.attn_norm.weight"


def refuse(directory: Path, message: str, kind: type[Exception] = CheckpointError) -> None:
    """Loading must fail with this message, fast enough to be a header check."""
    begin = time.thread_time()  # other threads of the test process may be busy
    with pytest.raises(kind, match=message):
        cedar.load(directory)
    assert time.thread_time() - begin < 1.0


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a one-file checkpoint and write file and index again."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)
    weight_map = dict.fromkeys(tensors, SINGLE)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((directory / INDEX).read_text())
    change(document["weight_map"])
    (directory / INDEX).write_text(json.dumps(document))


def edit_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON header of the single file, payload left as it is."""
    file = directory / SINGLE
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((directory / "config.json").read_text())
    change(document)
    (directory / "config.json").write_text(json.dumps(document))
