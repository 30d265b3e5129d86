"""Checkpoint errors: each names what is wrong, before any weight is read and within a second."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cedar
from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import weight_schema
from cedar.errors import CheckpointError, ConfigError
from cedar.formats import checkpoint
from cedar.formats.headers import read_headers

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NORM = "layers.0.attn_norm.weight"


@pytest.fixture
def copy_of(tmp_path: Path, model_directory: Callable[[str], Path]) -> Callable[[str], Path]:
    """`copy_of(model)`: a recorded model in a directory of its own, without its recordings."""

    def copy(model: str) -> Path:
        target = tmp_path / model
        target.mkdir()
        for file in model_directory(model).iterdir():
            if not file.name.startswith("golden"):
                shutil.copy(file, target)
        return target

    return copy


def refuse(directory: Path, message: str, kind: type[Exception] = CheckpointError) -> None:
    """Loading must fail with this message, fast enough to be a header check."""
    begin = time.process_time()
    with pytest.raises(kind, match=message):
        cedar.load(directory)
    assert time.process_time() - begin < 1.0


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


# Tensors that do not fit the config.


def test_missing_tensors_are_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    edit_weights(directory, lambda t: t.pop(NORM))
    refuse(directory, rf"checkpoint lacks 1 tensor\(s\) that config.json asks for: {NORM}$")


def test_many_missing_tensors_are_counted_and_some_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")

    def drop_layer(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("layers.7.")]:
            del tensors[name]

    edit_weights(directory, drop_layer)
    refuse(directory, r"checkpoint lacks \d\d tensor\(s\) .*: layers\.7\..*, \.\.\. and \d\d more$")


@pytest.mark.parametrize(
    "name", ["layers.0.attn.q_head_norm.weight", "layers.0.ape", "hc_head_fn", "model.norm.weight"]
)
def test_extra_tensors_are_named(copy_of: Callable[[str], Path], name: str) -> None:
    """Tensors of the older family member, such as a per-head query norm, are not ignored."""
    directory = copy_of("m1")
    edit_weights(directory, lambda t: t.update({name: torch.ones(64, dtype=torch.bfloat16)}))
    refuse(directory, rf"has 1 tensor\(s\) that config.json does not describe: {name} \(first in")


def test_a_transposed_tensor_is_refused_with_both_shapes(copy_of: Callable[[str], Path]) -> None:
    directory, name = copy_of("m1"), "layers.7.attn.wq_a.weight"
    edit_weights(directory, lambda t: t.update({name: t[name].t().contiguous()}))
    refuse(
        directory,
        rf"{name} in model.safetensors has shape \[96, 64\], config.json asks for \[64, 96\]",
    )


def test_a_tensor_of_another_dtype_is_refused_with_both(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m1")
    edit_weights(directory, lambda t: t.update({NORM: t[NORM].float()}))
    refuse(directory, f"{NORM} in model.safetensors is F32, config.json asks for BF16")


def test_packed_fp4_stored_as_unsigned_bytes_is_refused(copy_of: Callable[[str], Path]) -> None:
    directory, name = copy_of("m2"), "layers.0.ffn.experts.0.w1.weight"
    edit_weights(directory, lambda t: t.update({name: t[name].view(torch.uint8)}))
    refuse(directory, f"{name} in model.safetensors is U8, config.json asks for I8")


def test_a_dropped_scale_is_named(copy_of: Callable[[str], Path]) -> None:
    directory, name = copy_of("m2"), "layers.3.attn.wkv.scale"
    edit_weights(directory, lambda t: t.pop(name))
    refuse(directory, rf"checkpoint lacks 1 tensor\(s\) .*: {name}$")


def test_a_dropped_image_bias_is_named(copy_of: Callable[[str], Path]) -> None:
    directory, name = copy_of("m7"), "layers.2.ffn.gate.bias_vl"
    shard = next(
        file for file in sorted(directory.glob("*.safetensors")) if name in load_file(file)
    )
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    edit_index(directory, lambda weight_map: weight_map.pop(name))
    refuse(directory, rf"checkpoint lacks 1 tensor\(s\) .*: {name}$")


# Files and index.


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


# Order: everything is checked from headers before any data is read.


def test_nothing_is_read_before_all_headers_are_checked(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong shape in the last layer must not be found after minutes of reading."""
    directory, name = copy_of("m1"), "layers.7.ffn.shared_experts.w2.weight"
    edit_weights(directory, lambda t: t.update({name: t[name].t().contiguous()}))
    opened: list[object] = []
    monkeypatch.setattr(checkpoint, "safe_open", lambda *args, **kwargs: opened.append(args))
    refuse(directory, rf"{name} in model.safetensors has shape")
    assert opened == []


def test_headers_of_a_file_without_its_payload_can_be_checked(
    copy_of: Callable[[str], Path],
) -> None:
    """The released shapes are checked from headers alone, whatever the size of the files."""
    directory = copy_of("m1")
    whole = read_headers(directory)
    assert set(whole) == {
        spec.name for spec in weight_schema(ModelConfig.from_pretrained(directory))
    }
    assert whole[NORM].shape == (96,)
    assert whole[NORM].nbytes == 192


# Tokenizer of an Engram model.


def test_a_tokenizer_of_another_size_is_refused(copy_of: Callable[[str], Path]) -> None:
    """Every hash multiplier depends on the compressed vocabulary: another one reads wrong rows."""
    directory = copy_of("m3")
    edit_config(directory, lambda d: d["text_config"].update(engram_compressed_vocab_size=352))
    refuse(
        directory,
        r"tokenizer.json compresses to 353 ids but engram_compressed_vocab_size=352: this is not",
    )


def test_a_tokenizer_with_fewer_tokens_than_the_model_is_refused(
    copy_of: Callable[[str], Path],
) -> None:
    directory = copy_of("m3")
    document = json.loads((directory / "tokenizer.json").read_text())
    del document["added_tokens"][-1]
    (directory / "tokenizer.json").write_text(json.dumps(document))
    refuse(directory, r"tokenizer.json has 511 tokens, fewer than vocab_size=512")


def test_a_missing_or_damaged_tokenizer_is_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("m3")
    (directory / "tokenizer.json").write_text("{")
    refuse(directory, r"tokenizer.json is not a tokenizer: ")
    (directory / "tokenizer.json").unlink()
    refuse(directory, r"tokenizer.json does not exist; Engram layers need the tokenizer")


def test_engram_rows_of_another_prime_search_are_refused(
    copy_of: Callable[[str], Path],
) -> None:
    directory = copy_of("m3")
    edit_config(directory, lambda d: d["text_config"].update(engram_vocab_size=90))
    refuse(directory, r"does not match the primes derived from engram_vocab_size=90", ConfigError)
