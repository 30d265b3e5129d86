"""Loading and writing checkpoints that are right: every tensor arrives, packed ones stay packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cedar
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.config.weight_schema import weight_schema
from cedar.engine.random_weights import random_tensors
from cedar.errors import UsageError
from cedar.formats.checkpoint import CheckpointReader, write_checkpoint

INDEX = "model.safetensors.index.json"


def test_arguments_of_load_are_checked(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("m1")
    with pytest.raises(UsageError, match=r"kernels='fast' is not a choice; allowed: auto"):
        cedar.load(directory, kernels="fast")
    with pytest.raises(
        UsageError, match=r"dtype='fp16' is not a choice; allowed: None, 'bfloat16'"
    ):
        cedar.load(directory, dtype="fp16")
    with pytest.raises(UsageError, match="index_key_rule='x' is not a choice; allowed: corrected"):
        cedar.load(directory, index_key_rule="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown preset 'huge'"):
        cedar.load("preset:huge")
    with pytest.raises(UsageError, match=r"random weights are not possible .* Engram"):
        cedar.load("preset:v4.1-flash")


@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_a_written_checkpoint_is_read_back(tmp_path: Path, name: str) -> None:
    config = preset(name)
    tensors = random_tensors(config, 3)
    write_checkpoint(tmp_path, tensors, config.to_dict())
    assert ModelConfig.from_pretrained(tmp_path) == config
    with CheckpointReader(tmp_path, weight_schema(config)) as reader:
        for key, tensor in tensors.items():
            assert torch.equal(reader.tensor(key), tensor)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert not list(tmp_path.glob(".*"))


def test_random_weights_are_the_same_for_a_seed_and_others_for_another() -> None:
    config = preset("tiny")
    first, again, other = (random_tensors(config, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_packed_weights_stay_packed(model_directory: Callable[[str], Path]) -> None:
    """No bfloat16 copy of quantised weights is made."""
    net = cedar.load(model_directory("m2"), kernels="reference").net
    stored = dict(net.named_parameters())
    assert stored["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert stored["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert stored["layers.0.ffn.experts.0.w1.weight"].shape == (64, 48)


@pytest.mark.parametrize("model", ["m1", "m2", "m3", "m6", "m7"])
def test_every_backbone_tensor_is_loaded(
    model_directory: Callable[[str], Path], model: str
) -> None:
    """Nothing keeps an initial value, and only drafts and vision are left aside."""
    directory = model_directory(model)
    net = cedar.load(directory, kernels="reference").net
    schema = list(weight_schema(ModelConfig.from_pretrained(directory)))
    wanted = {spec.name for spec in schema if spec.part not in ("draft", "vision")}
    loaded = dict(net.named_parameters())
    assert set(loaded) == wanted
    stored: dict[str, Tensor] = {}
    for file in directory.glob("model*.safetensors"):
        stored |= load_file(file)
    for name, parameter in loaded.items():
        assert torch.equal(parameter.view(torch.uint8), stored[name].view(torch.uint8)), name
