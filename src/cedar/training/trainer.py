"""The training loop: phases, schedule, router balance, checkpoints, progress lines.

Builds nothing from names and reads no files but its checkpoint; `cli/train.py` hands it model, data
and budget. Deterministic under a seed and a token budget; under a minute budget the phase switches
follow the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.config.model_config import ModelConfig
from cedar.errors import CheckpointError
from cedar.model.causal_lm import CausalLM
from cedar.training.checkpointing import load_training_state, save_training_state
from cedar.training.data import TokenBatches
from cedar.training.forward import check_trainable, hidden_rows
from cedar.training.initialise import initialise
from cedar.training.kernels import Kernels
from cedar.training.losses import chunked_cross_entropy
from cedar.training.operators import TrainingOperators
from cedar.training.optimizers import Optimisers
from cedar.training.quantiser import WeightQuantiser
from cedar.training.recipes import PhaseSpec, Recipe
from cedar.training.rows import Phase, TrainingRows


@dataclass(frozen=True)
class Budget:
    """When a run ends: after `tokens`, or after `minutes` of training; exactly one is given."""

    tokens: int | None = None
    minutes: float | None = None

    def progress(self, tokens: int, seconds: float) -> float:
        """Share of the budget that is used."""
        if self.tokens is not None:
            return tokens / self.tokens
        assert self.minutes is not None
        return seconds / (60 * self.minutes)


@dataclass(frozen=True)
class StepReport:
    """What one update did."""

    step: int
    tokens: int
    seconds: float
    progress: float
    rate: float
    loss: float
    index_loss: float
    grad_norm: float


def trainable_config(released: ModelConfig) -> ModelConfig:
    """The same model with plain weights, as masters are kept."""
    return replace(released, dense_dtype="bf16", expert_dtype="bf16")


class Trainer:
    """One run.

    Args:
        released: the config that will be shipped; masters are its unpacked form.
        recipe: phases and rates.   batches: `[batch, window + 1]` token ids.
        kernels: compiled or plain pieces.   seed: of the weights and of the taught queries.
    """

    def __init__(
        self, released: ModelConfig, recipe: Recipe, batches: TokenBatches, *, kernels: Kernels,
        seed: int, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.released, self.recipe, self.batches, self.kernels = released, recipe, batches, kernels
        self.ops = TrainingOperators(kernels)
        self.model = CausalLM(trainable_config(released), self.ops, dtype)
        check_trainable(self.model)
        initialise(self.model, seed)
        self.optimisers = Optimisers(
            self.model, lr=recipe.lr, muon_lr=recipe.muon_lr, betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )  # fmt: skip
        self.quantiser = WeightQuantiser(self.model, released, self.ops, kernels)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = self.tokens = 0
        self.seconds = 0.0

    @property
    def parameters(self) -> int:
        """Values of all masters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def losses(self, ids: Tensor, phase: PhaseSpec, *, teach: bool = True) -> tuple[Tensor, Tensor]:
        """Cross entropy and index KL of `ids [B, T + 1]` in a phase."""
        config, batch, length = self.model.config, ids.shape[0], ids.shape[1] - 1
        rows = TrainingRows(
            self.model.plan, batch=batch, length=length, scale=config.head_dim**-0.5,
            phase=Phase(phase.sparse, phase.quantise, self.recipe.index_queries if teach else 0),
            kernels=self.kernels, generator=self.generator,
        )  # fmt: skip
        self.quantiser.clear()
        if phase.quantise:
            self.quantiser.prepare(self.model.dtype)
        hidden = hidden_rows(self.model, ids[:, :-1], rows, self.kernels)
        targets = ids[:, 1:].flatten()
        loss = chunked_cross_entropy(hidden, self.model.head.weight, targets, self.kernels)
        kl = torch.stack(rows.losses).mean() if rows.losses else torch.zeros(())
        return loss, kl

    def update(self, phase: PhaseSpec, progress: float) -> StepReport:
        """One optimiser step."""
        recipe = self.recipe
        total, total_kl = 0.0, 0.0
        self.ops.counts.clear()
        for _ in range(phase.accumulate):
            ids = folded(next(self.batches), phase.length)
            loss, kl = self.losses(ids, phase)
            ((loss + kl) / phase.accumulate).backward()
            total += loss.item() / phase.accumulate
            total_kl += kl.item() / phase.accumulate
            self.tokens += ids.shape[0] * (ids.shape[1] - 1)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip, foreach=True)
        rate = recipe.rate_at(progress, self.tokens)
        self.optimisers.step(rate)
        self._balance(rate)
        self.step += 1
        return StepReport(
            self.step, self.tokens, self.seconds, progress, rate, total, total_kl, float(norm)
        )

    @torch.no_grad()
    def _balance(self, rate: float) -> None:
        """Loss-free balancing: raise the bias of experts below the mean load, lower the others."""
        layers = len(self.model.plan.layers)
        for layer in range(layers):
            counts = torch.stack(self.ops.counts[layer::layers]).sum(0).float()
            bias = self.model.block(layer).ffn.gate.bias
            step = self.recipe.bias_step * min(1.0, 2 * rate)
            bias.add_(torch.sign(counts.mean() - counts), alpha=step)

    def run(
        self, budget: Budget, directory: Path, *, report: Callable[[StepReport], None],
        stop: Callable[[], bool] = lambda: False, save_every: float = 240.0,
    ) -> bool:  # fmt: skip
        """Train until the budget is used or `stop` says so, asked after every update.

        Writes a checkpoint every `save_every` seconds and at the end, stopped or not.

        Returns: whether the budget is used.
        """
        saved, before, started = self.seconds, self.seconds, time.perf_counter()
        while (progress := budget.progress(self.tokens, self.seconds)) < 1:
            report(self.update(self.recipe.phase_at(progress), progress))
            self.seconds = before + time.perf_counter() - started
            if self.seconds - saved >= save_every:
                self.save(directory)
                saved = self.seconds
            if stop():
                break
        self.save(directory)
        return budget.progress(self.tokens, self.seconds) >= 1

    def save(self, directory: Path) -> None:
        """Write a checkpoint."""
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimisers": self.optimisers.state_dict(),
            "batches": self.batches.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        save_training_state(directory, state)

    def resume(self, directory: Path) -> None:
        """Go on from a checkpoint of the same recipe.

        Raises:
            CheckpointError: it belongs to another model.
        """
        state: dict[str, Any] = load_training_state(directory)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(
                f"the checkpoint in {directory} is of another model than recipe "
                f"{self.recipe.preset!r}: {error}"
            ) from error
        self.optimisers.load_state_dict(state["optimisers"])
        self.batches.load_state_dict(state["batches"])
        self.generator.set_state(state["generator"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds = state["seconds"]


def folded(ids: Tensor, length: int) -> Tensor:
    """Cut windows `[B, n * length + 1]` into `[B * n, length + 1]` that overlap by one id."""
    pieces = [ids[:, at : at + length + 1] for at in range(0, ids.shape[1] - 1, length)]
    return torch.stack(pieces, 1).flatten(0, 1)
