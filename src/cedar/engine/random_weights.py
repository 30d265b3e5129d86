"""Random weights for presets and tests: shaped by the weight schema, scaled like trained ones.

Standard deviations follow third-party statistics of the released weights (specification 3.5): with
unit norms and plain fan-in scaling a random model is far more chaotic than a real one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import TensorSpec, weight_schema
from cedar.engine.skipped_parts import NOT_LOADED
from cedar.formats.codec import encode_fp4_weight, encode_fp8_weight

#: Mean of norm weights, by the last name before `.weight`.
_NORM_MEANS = {"attn_norm": 0.2, "ffn_norm": 0.2, "q_norm": 0.97, "kv_norm": 0.4, "k_norm": 0.5,
               "norm": 0.6}  # fmt: skip


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every backbone tensor of a config by its released name."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for spec in weight_schema(config):
        if spec.part in NOT_LOADED or spec.name in tensors:
            continue
        tensors |= _draw(spec, generator)
    return tensors


def _draw(spec: TensorSpec, generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    leaf = spec.name.split(".")[-2] if spec.name.endswith(".weight") else spec.name.split(".")[-1]
    if spec.tag == "I8":
        out, half = spec.shape
        packed = encode_fp4_weight(normal(out, 2 * half) * (2 * half) ** -0.5)
        return _quantised(spec, packed.codes.view(torch.int8), packed.scales)
    if spec.tag == "F8_E4M3":
        out, inp = spec.shape
        quantised = encode_fp8_weight(normal(out, inp) * inp**-0.5)
        return _quantised(spec, quantised.codes.view(torch.float8_e4m3fn), quantised.scales)
    if spec.tag == "F8_E8M0":
        return {}
    if leaf in _NORM_MEANS and len(spec.shape) == 1:
        value = _NORM_MEANS[leaf] * (1 + 0.1 * normal(*spec.shape))
    elif leaf.endswith("_fn"):
        value = normal(*spec.shape) * spec.shape[1] ** -0.5
    elif leaf.endswith("_base"):
        value = _mix_base(spec.shape[0]) + 0.1 * normal(*spec.shape)
    elif leaf.endswith("_scale") or leaf == "scale":
        value = torch.full(spec.shape, 0.5 if leaf.endswith("_scale") else 1.0)
    elif leaf == "embed":
        value = 0.12 * normal(*spec.shape)
    elif leaf in ("bias", "bias_vl", "attn_sink") or len(spec.shape) == 1:
        value = 0.1 * normal(*spec.shape)
    else:
        value = normal(*spec.shape) * spec.shape[-1] ** -0.5
    return {spec.name: value.to(torch.bfloat16) if spec.tag == "BF16" else value.float()}


def _quantised(spec: TensorSpec, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
    scale_name = spec.name.removesuffix(".weight") + ".scale"
    return {spec.name: values, scale_name: scales.view(torch.float8_e8m0fnu)}


def _mix_base(size: int) -> Tensor:
    """pre near 1/C each, post near 1, comb near the identity, as trained hyper-connections are."""
    copies = next(c for c in range(1, size) if c * (c + 2) == size)
    base = torch.zeros(size)
    base[:copies] = -1.0
    base[2 * copies :] = (3 * torch.eye(copies)).flatten()
    return base
