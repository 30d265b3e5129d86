"""Held-out loss with the training forward pass: cheap, frequent. Called by `cli/train.py`.

The loss of an exported model is measured with the inference forward pass instead
(`evaluate_model` here takes any `ids -> logits` function).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from cedar.training.data import TokenFile
from cedar.training.recipes import PhaseSpec, nats_to_bits_per_byte
from cedar.training.trainer import Trainer


@dataclass(frozen=True)
class HeldOut:
    """Windows of the held-out documents and what a token is worth in bytes.

    Attributes:
        windows: int64 `[n, T + 1]`.   tokens, bytes: of all held-out documents.
    """

    windows: Tensor
    tokens: int
    bytes: int

    def bits_per_byte(self, nats_per_token: float) -> float:
        """See `nats_to_bits_per_byte`."""
        return nats_to_bits_per_byte(nats_per_token, self.tokens, self.bytes)


def held_out(path: str | Path, length: int, count: int | None = None) -> HeldOut:
    """Consecutive windows over the whole held-out file, or `count` of them evenly spread."""
    file = TokenFile(path)
    ids = torch.from_numpy(file.ids.astype("int64"))
    total = (ids.shape[0] - 1) // length
    windows = torch.stack([ids[i * length : (i + 1) * length + 1] for i in range(total)])
    if count is not None and count < total:
        windows = windows[torch.linspace(0, total - 1, count).long()]
    return HeldOut(windows, int(ids.shape[0]), sum(entry.bytes for entry in file.documents))


@torch.no_grad()
def training_loss(trainer: Trainer, data: HeldOut, phase: PhaseSpec, batch: int) -> float:
    """Mean nats per token under a phase's attention and rounding."""
    total, windows = 0.0, 0
    for ids in data.windows.split(batch):
        if ids.shape[0] == batch:
            total += float(trainer.losses(ids, phase, teach=False)[0])
            windows += 1
    trainer.ops.counts.clear()
    return total / windows


@torch.no_grad()
def evaluate_model(score: Callable[[Tensor], Tensor], data: HeldOut, batch: int) -> float:
    """Mean nats per token of `score: ids [B, T] -> logits [B, T, V]`."""
    total, count = 0.0, 0
    for ids in data.windows.split(batch):
        logits = score(ids[:, :-1])
        total += float(
            F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
        )
        count += ids[:, 1:].numel()
    return total / count
