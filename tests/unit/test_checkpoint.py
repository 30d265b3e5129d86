"""Checkpoint errors: each names what is wrong, before any weight is read and within a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_copies import (
    NORM,
    edit_config,
    edit_index,
    edit_weights,
    refuse,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import weight_schema
from cedar.errors import ConfigError
from cedar.formats import checkpoint
from cedar.formats.headers import read_headers


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
