"""Optimisers: Muon for hidden matrices, AdamW for the rest, and which parameter goes where.

Muon (Jordan et al., 2024) replaces a matrix's momentum by its nearest orthogonal matrix, found with
five Newton-Schulz steps; scaled by 0.2 * sqrt(max side) as in Moonlight (arXiv 2502.16982), so that
one learning rate means the same root-mean-square step as AdamW's. Called by `trainer.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: Coefficients of the quintic iteration, from the public Muon implementation.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest orthogonal matrices of `[n, rows, columns]`, roughly (singular values 0.7 to 1.2)."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        mix = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, mix, x, beta=_A)
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; matrices of one shape are handled in one batch."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(parameters), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._update(parameters, max(shape), group)

    def _update(self, parameters: list[nn.Parameter], side: int, group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        values: list[Tensor] = list(parameters)
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
        directions = orthogonalise(torch.stack(ahead)).float()
        rate = group["lr"]
        torch._foreach_mul_(values, 1 - rate * group["weight_decay"])
        torch._foreach_add_(values, list(directions.unbind()), alpha=-rate * 0.2 * side**0.5)


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Hidden matrices of attention and experts; not embeddings, router, mixes or the index branch."""
    if parameter.dim() != 2 or not name.startswith("layers."):
        return False
    return not any(part in name for part in (".gate.", "hc_", ".indexer.", ".kv_adapter."))


def split_parameters(
    model: nn.Module,
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters: for Muon; for AdamW with decay; for AdamW without decay."""
    muon, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if uses_muon(name, parameter):
            muon.append(parameter)
        elif parameter.dim() == 2 and "hc_" not in name:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    return muon, decayed, plain


class Optimisers:
    """Both optimisers with one schedule factor.

    Args:
        model: float32 masters.   lr, muon_lr: peak learning rates.   muon_lr 0 = AdamW for all.
    """

    def __init__(
        self, model: nn.Module, *, lr: float, muon_lr: float, betas: tuple[float, float],
        weight_decay: float,
    ) -> None:  # fmt: skip
        muon, decayed, plain = split_parameters(model)
        if not muon_lr:
            muon, decayed = [], muon + decayed
        self.peaks = (lr, muon_lr)
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)
        self.muon = (
            Muon(muon, lr=muon_lr, momentum=0.95, weight_decay=weight_decay) if muon else None
        )

    def step(self, factor: float) -> None:
        """Update with the peak rates times `factor`, then drop the gradients."""
        for optimiser, peak in ((self.adamw, self.peaks[0]), (self.muon, self.peaks[1])):
            if optimiser is None:
                continue
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {
            "adamw": self.adamw.state_dict(),
            "muon": None if self.muon is None else self.muon.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.adamw.load_state_dict(state["adamw"])
        if self.muon is not None:
            self.muon.load_state_dict(state["muon"])
