"""`load`: a model directory, `nano` or a preset -> `LoadedModel`. Called by `LLM` and the CLI.

Headers are checked against the config before any weight is read. Packed weights stay packed, backed
by the memory-mapped files; nothing makes a wide copy of the whole model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cedar.cache.hashing import Fingerprint, files_digest, weights_digest
from cedar.config.engine_config import EngineConfig
from cedar.config.engram_hash import engram_hash
from cedar.config.model_config import ModelConfig
from cedar.config.modes import IndexKeyRule
from cedar.config.presets import preset
from cedar.config.weight_schema import weight_schema
from cedar.engine.forward import EngramRows
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.random_weights import random_tensors
from cedar.errors import UsageError
from cedar.formats.checkpoint import CheckpointReader
from cedar.kernels.backends import select_operators
from cedar.kernels.operators import Operators
from cedar.model.causal_lm import CausalLM
from cedar.model_directory import PRESET_PREFIX, resolve_model
from cedar.text.token_map import token_map


def load(
    path: str | Path,
    *,
    kernels: str = "auto",
    dtype: str | None = None,
    index_key_rule: IndexKeyRule = "corrected",
    seed: int = 0,
) -> LoadedModel:
    """Load a model.

    Args:
        path: a directory in Hugging Face layout, `nano`, or `preset:NAME` for random weights.
        kernels: auto, reference or native.
        dtype: None for the released arithmetic (bfloat16 activations), "float32" to upcast every
            weight and activation.
        index_key_rule: see `LoadedModel`.
        seed: of the random weights of a preset.

    Raises:
        UsageError: an argument is not allowed.   CheckpointError: config or weights are wrong.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"dtype={dtype!r} is not a choice; allowed: None, 'bfloat16', 'float32'")
    activations = torch.float32 if dtype == "float32" else torch.bfloat16
    ops = select_operators(kernels)
    if str(path).startswith(PRESET_PREFIX):
        config = preset(str(path).removeprefix(PRESET_PREFIX))
        return from_config(
            config, ops=ops, dtype=activations, index_key_rule=index_key_rule, seed=seed
        )
    directory = resolve_model(path)
    config = ModelConfig.from_pretrained(directory)
    net = build_net(config, ops, activations)
    names = [name for name, _ in net.named_parameters()]
    with CheckpointReader(directory, weight_schema(config)) as reader:
        assign(net, {name: reader.tensor(name) for name in names})
    engram = None
    if config.engram_layer_ids:
        assert config.engram_compressed_vocab_size and config.engram_pad_token_id is not None
        compressed = token_map(
            directory / "tokenizer.json",
            vocab_size=config.vocab_size,
            expected_size=config.engram_compressed_vocab_size,
        )
        pad = int(compressed[config.engram_pad_token_id])
        engram = EngramRows(engram_hash(config, pad), compressed)
    return LoadedModel(net, engram=engram, index_key_rule=index_key_rule)


def prefix_root(name: str | Path, model: LoadedModel, engine: EngineConfig, seed: int) -> bytes:
    """Fingerprint of everything that stored rows of this model depend on besides tokens.

    Reads all weights once to digest them.

    Args:
        name: as given to `load`.   model: what `load` made of it.   seed: of preset weights.
    """
    if str(name).startswith(PRESET_PREFIX):
        weights, tokenizer = f"{name} seed {seed}".encode(), b""
    else:
        directory = resolve_model(name)
        weights = weights_digest(directory)
        tokenizer = files_digest([directory / "tokenizer.json"])
    mode = engine.resolve_decoder_prefill(model.plan)
    return Fingerprint.of(
        model.config,
        weights=weights,
        tokenizer=tokenizer,
        index_key_rule=model.index_key_rule,
        replay_mode=f"{engine.encoder_replay}, decoder {mode} x {engine.replay_windows}",
        numerics=f"{model.net.dtype}, {model.ops.name}",
        block_size=engine.block_size,
    ).root()


def from_config(
    config: ModelConfig,
    *,
    ops: Operators,
    dtype: torch.dtype = torch.bfloat16,
    index_key_rule: IndexKeyRule = "corrected",
    seed: int = 0,
) -> LoadedModel:
    """A model with random weights, the same for the same config and seed.

    Raises:
        UsageError: the config has Engram layers, whose token map needs a tokenizer; or the seed is
            no 64-bit integer.
    """
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed={seed!r}; allowed are integers -(2**63)..2**63-1")
    if config.engram_layer_ids:
        raise UsageError(
            "random weights are not possible for a model with Engram layers: the n-gram rows depend "
            "on a tokenizer; load a model directory instead"
        )
    net = build_net(config, ops, dtype)
    assign(net, random_tensors(config, seed))
    return LoadedModel(net, index_key_rule=index_key_rule)


def reload_as(model: LoadedModel, config: ModelConfig) -> LoadedModel:
    """The same weights, shared and not copied, under another plan that needs no other tensors."""
    net = build_net(config, model.ops, model.net.dtype)
    weights = dict(model.net.named_parameters())
    assign(net, {name: weights[name].detach() for name, _ in net.named_parameters()})
    return LoadedModel(net, engram=model.forward.engram, index_key_rule=model.index_key_rule)


def build_net(config: ModelConfig, ops: Operators, dtype: torch.dtype) -> CausalLM:
    """The backbone without weights (no memory is allocated for them)."""
    with torch.device("meta"):
        net = CausalLM(config, ops, dtype)
    return net


def assign(net: CausalLM, tensors: dict[str, Tensor]) -> None:
    """Give a backbone its weights; bfloat16 ones are upcast when it computes in float32."""
    if net.dtype == torch.float32:
        tensors = {
            name: t.float() if t.dtype == torch.bfloat16 else t for name, t in tensors.items()
        }
    net.load_state_dict(tensors, strict=True, assign=True)
    net.requires_grad_(False)
    net.eval()
