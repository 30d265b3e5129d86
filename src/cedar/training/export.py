"""Export of a training checkpoint in the released on-disk format. Called by `cli/train.py`.

Dense projections become E4M3 with one scale per 32 x 32 tile, experts packed E2M1 with one scale per
row and 32 columns; the rest is bfloat16 or float32, as the weight schema says.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import weight_schema
from cedar.errors import CheckpointError
from cedar.formats import codec
from cedar.formats.checkpoint import write_checkpoint, write_json

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_PACKED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def released_tensors(released: ModelConfig, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of `released`.

    Args:
        masters: float32, by released name, weights unpacked.
    Raises:
        CheckpointError: a master is missing.
    """
    tensors: dict[str, Tensor] = {}
    for spec in weight_schema(released):
        if spec.name in tensors:
            continue
        if spec.name not in masters:
            raise CheckpointError(
                f"the training checkpoint lacks {spec.name}; it is of another model"
            )
        master = masters[spec.name].detach()
        if spec.tag in _DTYPES:
            tensors[spec.name] = master.to(_DTYPES[spec.tag])
            continue
        encode = codec.encode_fp4_weight if spec.tag == "I8" else codec.encode_fp8_weight
        codes, scales = encode(master)
        tensors[spec.name] = codes.view(_PACKED[spec.tag])
        scale_name = spec.name.removesuffix("weight") + "scale"
        tensors[scale_name] = scales.view(torch.float8_e8m0fnu)
    return tensors


def export_model(
    directory: Path, released: ModelConfig, masters: Mapping[str, Tensor], tokenizer: Path
) -> None:
    """Write config, weights, index, tokenizer and generation defaults.

    Args:
        tokenizer: directory with `tokenizer.json`.
    """
    if not (tokenizer / _TOKENIZER_FILES[0]).is_file():
        raise CheckpointError(f"{tokenizer} has no tokenizer.json; a model needs one to be used")
    write_checkpoint(directory, released_tensors(released, masters), released.to_dict())
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, directory / name)
    defaults: dict[str, Any] = {
        "bos_token_id": released.bos_token_id,
        "eos_token_id": released.eos_token_id,
        "pad_token_id": released.pad_token_id,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    write_json(directory / "generation_config.json", defaults)
