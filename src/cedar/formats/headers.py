"""Safetensors headers: names, shapes, dtypes and file sizes, without reading any data. No torch.

A model directory holds `model.safetensors.index.json` naming shards, or one `model.safetensors`.
Called by the checkpoint reader and the planner.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cedar.config.weight_schema import TAG_BYTES, TensorSpec
from cedar.errors import CheckpointError

_MAX_HEADER_BYTES = 1 << 30
#: Bytes of one stored value, by safetensors dtype tag; tags of other models are not checked.
_TAG_BYTES: dict[str, int] = {"F16": 2, "U8": 1, "I32": 4, "I64": 8} | dict(TAG_BYTES.items())


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as a file's header describes it; `nbytes` is its payload."""

    name: str
    shape: tuple[int, ...]
    tag: str
    nbytes: int
    file: Path


def read_headers(path: Path, *, headers_only: bool = False) -> dict[str, TensorHeader]:
    """Headers of every tensor of a model directory.

    Args:
        headers_only: the files may end after their headers (planning without the weights).

    Raises:
        CheckpointError: no weights, a shard named by the index is absent or damaged or truncated, a
            tensor is in no file, in another file than the index says, or missing from the index.
    """
    index_file = path / "model.safetensors.index.json"
    if not index_file.is_file():
        single = path / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(
                f"{path} holds neither model.safetensors.index.json nor model.safetensors"
            )
        return read_file_headers(single, headers_only=headers_only)
    weight_map = _weight_map(index_file)
    found: dict[str, TensorHeader] = {}
    for shard in sorted(set(weight_map.values())):
        file = path / shard
        if not file.is_file():
            example = next(name for name, where in weight_map.items() if where == shard)
            raise CheckpointError(
                f"{index_file.name} names {shard} (for {example}), which is absent"
            )
        for name, header in read_file_headers(file, headers_only=headers_only).items():
            if weight_map.get(name) != shard:
                said = weight_map.get(name)
                where = "does not list it" if said is None else f"places it in {said}"
                raise CheckpointError(f"{name} is in {shard} but {index_file.name} {where}")
            found[name] = header
    lost = sorted(weight_map.keys() - found.keys())
    if lost:
        raise CheckpointError(
            f"{index_file.name} places {lost[0]} in {weight_map[lost[0]]}, which does not hold it"
        )
    return found


def _weight_map(index_file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index_file} is not a safetensors index: {error!r}") from None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_file}: weight_map must be an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or shard.startswith("."):
            raise CheckpointError(
                f"{index_file}: weight_map[{name!r}]={shard!r} is not a file name"
            )
    return weight_map


def read_file_headers(file: Path, *, headers_only: bool = False) -> dict[str, TensorHeader]:
    """Headers of one safetensors file; its length must match to the byte unless `headers_only`.

    Raises:
        CheckpointError: damaged header, or a payload that is shorter or longer than it states.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{file.name} is not a safetensors file (header of {length} bytes)"
            )
        raw = stream.read(length)
    try:
        document: dict[str, Any] = json.loads(raw)
        entries = {name: entry for name, entry in document.items() if name != "__metadata__"}
        ranges = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
        headers = {
            name: TensorHeader(
                name, tuple(entry["shape"]), entry["dtype"], ranges[name][1] - ranges[name][0], file
            )
            for name, entry in entries.items()
        }
        end = _check_ranges(file, headers, ranges)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CheckpointError(f"{file.name} has a damaged safetensors header") from None
    if not headers_only and size != 8 + length + end:
        raise CheckpointError(
            f"{file.name} is {size} bytes, its header promises {8 + length + end}: the file is "
            f"truncated or damaged; fetch it again"
        )
    return headers


def _check_ranges(
    file: Path, headers: dict[str, TensorHeader], ranges: dict[str, tuple[int, int]]
) -> int:
    """Require payloads of the stated shapes, one after another without gap or overlap.

    Returns: bytes of all payloads.
    """
    end = 0
    for name in sorted(ranges, key=lambda name: ranges[name]):
        header, (begin, stop) = headers[name], ranges[name]
        width = _TAG_BYTES.get(header.tag)
        if begin != end or (width is not None and header.nbytes != width * prod(header.shape)):
            raise CheckpointError(
                f"{name} in {file.name} is {header.tag} {list(header.shape)} but its header places it "
                f"at bytes {begin}..{stop}: the header is damaged; fetch the file again"
            )
        end = stop
    return end


def check_headers(headers: Mapping[str, TensorHeader], schema: Iterable[TensorSpec]) -> None:
    """Compare what the files hold with what the config asks for.

    Raises:
        CheckpointError: a tensor is missing, extra, mis-shaped or mis-typed; names it and its file.
    """
    expected = {spec.name: spec for spec in schema}
    missing = sorted(expected.keys() - headers.keys())
    if missing:
        raise CheckpointError(
            f"checkpoint lacks {len(missing)} tensor(s) that config.json asks for: {_some(missing)}"
        )
    extra = sorted(headers.keys() - expected.keys())
    if extra:
        first = headers[extra[0]].file.name
        raise CheckpointError(
            f"checkpoint has {len(extra)} tensor(s) that config.json does not describe: "
            f"{_some(extra)} (first in {first}); the config and the weights are of different models"
        )
    for name, spec in expected.items():
        header = headers[name]
        if header.shape != spec.shape:
            raise CheckpointError(
                f"{name} in {header.file.name} has shape {list(header.shape)}, config.json asks for "
                f"{list(spec.shape)}"
            )
        if header.tag != spec.tag:
            raise CheckpointError(
                f"{name} in {header.file.name} is {header.tag}, config.json asks for {spec.tag}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... and {len(names) - 5} more"
