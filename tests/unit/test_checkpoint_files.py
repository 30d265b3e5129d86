"""Files and indexes that are absent, damaged, truncated or lie about what they hold."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_copies import (
    INDEX,
    NORM,
    SINGLE,
    edit_header,
    edit_index,
    refuse,
)

import cedar
from cedar.errors import ConfigError


def test_a_shard_that_the_index_names_must_be_there(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m7")
    (directory / "model-00002-of-00002.safetensors").unlink()
    refuse(
        directory,
        rf"{INDEX} names model-00002-of-00002.safetensors \(for [\w.]+\), which is absent",
    )


def test_a_tensor_absent_from_the_index_is_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m7")
    name = "norm.weight"
    edit_index(directory, lambda weight_map: weight_map.pop(name))
    refuse(
        directory, rf"{name} is in model-0000\d-of-00002.safetensors but {INDEX} does not list it"
    )


def test_a_tensor_in_another_shard_than_the_index_says_is_named(
    copy_of: Callable[[str], Path],
) -> None:
    directory, name = copy_of("m7"), "norm.weight"
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    def swap(weight_map: dict[str, str]) -> None:
        weight_map[name] = shards[1 - shards.index(weight_map[name])]

    edit_index(directory, swap)
    refuse(directory, rf"{name} is in model-.* but {INDEX} places it in model-.*")


def test_a_tensor_that_only_the_index_knows_is_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    edit_index(directory, lambda weight_map: weight_map.update({"ghost.weight": SINGLE}))
    refuse(directory, f"{INDEX} places ghost.weight in {SINGLE}, which does not hold it")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", ".hidden", 7])
def test_a_shard_name_that_is_no_file_name_is_refused(
    copy_of: Callable[[str], Path], shard: object
) -> None:
    directory = copy_of("m1")
    edit_index(directory, lambda weight_map: weight_map.update({NORM: shard}))
    refuse(directory, rf"weight_map\['{NORM}'\]={re.escape(repr(shard))} is not a file name")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_refused(copy_of: Callable[[str], Path], text: str) -> None:
    directory = copy_of("m1")
    (directory / INDEX).write_text(text)
    refuse(directory, f"{INDEX}(: weight_map must be an object| is not a safetensors index)")


def test_a_model_without_weights_says_what_was_looked_for(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    (directory / INDEX).unlink()
    cedar.load(directory)  # a single file needs no index
    (directory / SINGLE).unlink()
    refuse(directory, f"holds neither {INDEX} nor {SINGLE}")


def test_a_missing_config_is_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    (directory / "config.json").unlink()
    refuse(directory, r"config.json does not exist; a model directory needs", ConfigError)


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", r"nowhere' is not a directory; pass a model directory")


@pytest.mark.parametrize("cut", [1, 1000])
@pytest.mark.parametrize("model", ["m1", "m7"])
def test_a_truncated_file_is_refused_by_name_and_size(
    copy_of: Callable[[str], Path], model: str, cut: int
) -> None:
    """One missing byte is enough: a mapping past the end would read as zeros."""
    directory = copy_of(model)
    file = sorted(directory.glob("*.safetensors"))[-1]
    size = file.stat().st_size
    os.truncate(file, size - cut)
    refuse(
        directory, f"{file.name} is {size - cut} bytes, its header promises {size}: .* truncated"
    )


def test_a_file_with_bytes_after_its_payload_is_refused(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    with (directory / SINGLE).open("ab") as stream:
        stream.write(b"\0")
    refuse(directory, r"model.safetensors is \d+ bytes, its header promises \d+")


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, struct.pack("<Q", 1 << 40) + b"{}", b"\xff" * 64]
)
def test_a_file_that_is_no_safetensors_file_is_refused(
    copy_of: Callable[[str], Path], content: bytes
) -> None:
    directory = copy_of("m1")
    (directory / SINGLE).write_bytes(content)
    refuse(directory, r"model.safetensors is not a safetensors file \(header of \d+ bytes\)")


@pytest.mark.parametrize("header", [b"[]", b"{nope", b'{"a": {"dtype": "F32"}}', b'{"a": 1}'])
def test_a_damaged_header_is_refused(copy_of: Callable[[str], Path], header: bytes) -> None:
    directory = copy_of("m1")
    (directory / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header)
    refuse(directory, "model.safetensors has a damaged safetensors header")


def test_a_payload_of_another_size_than_its_shape_is_refused(
    copy_of: Callable[[str], Path],
) -> None:
    directory = copy_of("m1")

    def shrink(header: dict[str, Any]) -> None:
        begin, end = header[NORM]["data_offsets"]
        header[NORM]["data_offsets"] = [begin, end - 2]

    edit_header(directory, shrink)
    refuse(directory, rf"{NORM} in model.safetensors is BF16 \[96\] but .* header is damaged")


def test_overlapping_payloads_are_refused(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    edit_header(directory, lambda h: h[NORM].update(h["layers.1.attn_norm.weight"]))
    refuse(directory, r"in model.safetensors is .* but its header places it at bytes")
