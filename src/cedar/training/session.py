"""One `cedar train` run: wires corpus, recipe, trainer, held-out loss and export together.

Knows directories and progress lines; the loop is `trainer.py`, the arithmetic below it. Called by
`cli/train.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.errors import UsageError
from cedar.training.checkpointing import FILE_NAME
from cedar.training.data import TokenBatches, TokenFile
from cedar.training.evaluate import HeldOut, held_out, training_loss
from cedar.training.export import export_model
from cedar.training.kernels import Kernels, find_compiler
from cedar.training.native_step import NativeStep, build
from cedar.training.recipes import Recipe, recipe
from cedar.training.trainer import Budget, StepReport, Trainer

#: Updates between two progress lines, and tokens between two held-out losses.
_LINE_STEPS = 20
_EVALUATE_TOKENS = 500_000
#: Held-out windows of the running figure; the model card's figure uses all of them.
_EVALUATE_WINDOWS = 48


@dataclass(frozen=True)
class SessionOptions:
    """What `cedar train` was asked for.

    Attributes:
        recipe: its name.   data: directory with `train.bin`, `heldout.bin` and `tokenizer.json`.
        out: directory of the training checkpoint.   compiled: use the C++ compiler if there is one.
    """

    recipe: str
    data: Path
    out: Path
    budget: Budget
    seed: int = 0
    compiled: bool = True
    resume: bool = False


class Session:
    """A run that is ready to start.

    Raises:
        UsageError: the data are not there or do not fit the recipe's model, or there already is a
            checkpoint and `resume` was not asked for.
        CheckpointError: `resume` was asked for and the checkpoint is missing or of another run.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.recipe: Recipe = recipe(options.recipe)
        self.released: ModelConfig = preset(self.recipe.preset)
        if not options.resume and (options.out / FILE_NAME).exists():
            raise UsageError(
                f"{options.out / FILE_NAME} exists; pass --resume to go on with it, or another --out"
            )
        tokens = TokenFile(options.data / "train.bin")
        if tokens.vocab_size > self.released.vocab_size:
            raise UsageError(
                f"{tokens.path} was written with {tokens.vocab_size} ids, the model of recipe "
                f"{options.recipe!r} has {self.released.vocab_size}; train a tokenizer of that size"
            )
        batches = TokenBatches(tokens.path, self.recipe.batch, self.recipe.window, options.seed)
        self.trainer = Trainer(
            self.released, self.recipe, batches, kernels=kernels_for(self.released, options),
            seed=options.seed,
        )  # fmt: skip
        shortest = min(phase.length for phase in self.recipe.phases)
        self.held_out: HeldOut = held_out(options.data / "heldout.bin", shortest, _EVALUATE_WINDOWS)
        if options.resume:
            self.trainer.resume(options.out)

    def run(self, say: Callable[[str], None], stop: Callable[[], bool]) -> bool:
        """Train; `say` receives progress lines. Returns whether the budget was used up."""
        lines = _Progress(self, say)
        return self.trainer.run(self.options.budget, self.options.out, report=lines, stop=stop)

    def held_out_loss(self, progress: float) -> float:
        """Nats per token on the held-out windows, as the phase at `progress` computes."""
        length = self.held_out.windows.shape[1] - 1
        phase = replace(self.recipe.phase_at(progress), length=length)
        batch = min(self.recipe.batch * self.recipe.window // length, len(self.held_out.windows))
        return training_loss(self.trainer, self.held_out, phase, batch)

    def export(self, directory: Path) -> None:
        """Write the model in the released format."""
        export_model(directory, self.released, self.trainer.model.state_dict(), self.options.data)


def kernels_for(released: ModelConfig, options: SessionOptions) -> Kernels:
    """The fastest pieces this machine and this model allow."""
    compiler = find_compiler() if options.compiled else None
    if compiler is None:
        return Kernels()
    native = NativeStep(build(compiler, options.out)) if released.hc_mult == 4 else None
    return Kernels(compiled=True, native=native)


class _Progress:
    """Turns step reports into lines: a running mean of the loss, speed, now and then held-out loss."""

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self._session, self._say = session, say
        self._mean: float | None = None
        self._last = (session.trainer.tokens, session.trainer.seconds)
        self._evaluated = session.trainer.tokens

    def __call__(self, report: StepReport) -> None:
        self._mean = report.loss if self._mean is None else 0.97 * self._mean + 0.03 * report.loss
        if report.step % _LINE_STEPS == 0:
            tokens, seconds = report.tokens - self._last[0], report.seconds - self._last[1]
            speed = f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "- tokens/s"
            self._say(
                f"step {report.step}  {report.tokens / 1e6:.2f} M tokens  {100 * report.progress:.1f} %"
                f"  loss {self._mean:.3f}  index {report.index_loss:.4f}  rate {report.rate:.3f}"
                f"  norm {report.grad_norm:.2f}  {speed}"
            )
            self._last = (report.tokens, report.seconds)
        if report.tokens - self._evaluated >= _EVALUATE_TOKENS:
            self._evaluated = report.tokens
            nats = self._session.held_out_loss(report.progress)
            bits = self._session.held_out.bits_per_byte(nats)
            self._say(f"held-out {nats:.4f} nats/token, {bits:.4f} bits/byte")


def use_threads(count: int) -> None:
    """Intra-op threads of the process.

    Raises:
        UsageError: not at least 1.
    """
    if count < 1:
        raise UsageError(f"threads={count}: at least 1 is needed")
    torch.set_num_threads(count)
