"""Starting values of a model to be trained. Called by the trainer and tests.

Stable from the first step: every sublayer's output is added to all copies with weight about 1, the
copies keep their own content (`comb` near identity), each sublayer reads mainly one copy, and the
projections that write into the stream start small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cedar.model.causal_lm import CausalLM

#: Standard deviation of embedding and head.
_EMBED_STD = 0.05
_HEAD_STD = 0.02
#: Standard deviation of the hyper-connection projections and the factor on what they predict.
_HYPER_STD = 0.02
_HYPER_SCALE = 0.1
#: Bias toward each copy keeping its own content: softmax gives about 0.95.
_KEEP = 4.0
#: Bias toward reading one copy: sigmoid gives about 0.73 there and 0.27 elsewhere.
_READ = 1.0


@torch.no_grad()
def initialise(model: CausalLM, seed: int) -> None:
    """Fill every parameter of `model` (float32 masters) from one seed."""
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * len(model.plan.layers)
    for name, parameter in model.named_parameters():
        last = name.split(".")[-1]
        if name == "embed.weight":
            parameter.normal_(0, _EMBED_STD, generator=generator)
        elif name == "head.weight":
            parameter.normal_(0, _HEAD_STD, generator=generator)
        elif last in ("hc_attn_fn", "hc_ffn_fn"):
            parameter.normal_(0, _HYPER_STD, generator=generator)
        elif last in ("hc_attn_scale", "hc_ffn_scale"):
            parameter.fill_(_HYPER_SCALE)
        elif last in ("hc_attn_base", "hc_ffn_base"):
            layer, half = int(name.split(".")[1]), last == "hc_ffn_base"
            parameter.copy_(_hyper_base(model.config.hc_mult, 2 * layer + int(half)))
        elif last in ("bias", "attn_sink") or name.endswith("kv_adapter.up"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            std = parameter.shape[1] ** -0.5
            if name.endswith(("wo_b.weight", "w2.weight")):
                std /= math.sqrt(depth)
            parameter.normal_(0, std, generator=generator)
            if name.endswith("weights_proj.weight"):
                parameter.mul_(0.5)


def _hyper_base(copies: int, sublayer: int) -> Tensor:
    """Static part of the mixes; `pre` of a sublayer is read by the next one."""
    pre = torch.full((copies,), -_READ)
    pre[(sublayer + 1) % copies] = _READ
    comb = torch.eye(copies) * _KEEP
    return torch.cat((pre, torch.zeros(copies), comb.flatten()))
