"""The training loop: what it learns, that it resumes bit for bit, schedule, optimisers, balance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_corpus import write_token_file

from cedar.config.presets import preset
from cedar.errors import CheckpointError, ConfigError, UsageError
from cedar.training.checkpointing import FILE_NAME, load_training_state
from cedar.training.data import TokenBatches
from cedar.training.kernels import Kernels
from cedar.training.losses import index_loss
from cedar.training.optimizers import Optimisers, orthogonalise, split_parameters
from cedar.training.recipes import Recipe, nats_to_bits_per_byte, recipe
from cedar.training.trainer import Budget, StepReport, Trainer, folded


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    write_token_file(path, tokens=20_000, seed=1)
    return path


def _trainer(tokens: Path, how: Recipe | None = None, seed: int = 5) -> Trainer:
    how = how or recipe("tiny")
    batches = TokenBatches(tokens, how.batch, how.window, seed)
    return Trainer(preset("tiny"), how, batches, kernels=Kernels(), seed=seed)


def _run(trainer: Trainer, updates: int, out: Path, budget: Budget) -> list[StepReport]:
    reports: list[StepReport] = []
    trainer.run(budget, out, report=reports.append, stop=lambda: len(reports) == updates)
    return reports


def test_six_updates_a_resume_and_six_more_equal_twelve_in_one_go(
    tokens: Path, tmp_path: Path
) -> None:
    budget = Budget(tokens=14 * 64)  # twelve updates reach the last phase, which takes two batches
    straight = _trainer(tokens)
    expected = _run(straight, 12, tmp_path / "a", budget)
    first = _trainer(tokens)
    _run(first, 6, tmp_path / "b", budget)
    second = _trainer(tokens)
    second.resume(tmp_path / "b")
    rest = _run(second, 6, tmp_path / "b", budget)
    assert len(expected) == 12
    assert [r.loss for r in rest] == [r.loss for r in expected[6:]]
    for (name, one), two in zip(
        straight.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


def test_the_whole_run_passes_its_phases_ends_with_rate_zero_and_learns(
    tokens: Path, tmp_path: Path
) -> None:
    reports = _run(_trainer(tokens), -1, tmp_path / "run", Budget(tokens=4_000))
    assert reports[-1].rate < 0.1
    assert max(report.rate for report in reports) == 1.0
    first = sum(report.loss for report in reports[:10]) / 10
    last = sum(report.loss for report in reports[-10:]) / 10
    # The language has two equally likely next ids: ln 2 = 0.69 is the floor, ln 64 = 4.16 the start.
    assert first > 3.5
    assert last < 3.6
    assert reports[-1].index_loss < reports[5].index_loss


def test_a_minute_budget_counts_the_seconds_that_passed() -> None:
    assert Budget(minutes=2).progress(tokens=10**9, seconds=60) == 0.5
    assert Budget(tokens=200).progress(tokens=50, seconds=1e9) == 0.25


def test_the_rate_rises_stays_and_falls_to_the_floor() -> None:
    how = replace(recipe("nano"), warmup_tokens=1000, decay_from=0.5, floor=0.1)
    assert how.rate_at(0.0, 499) == 0.5
    assert how.rate_at(0.4, 10**6) == 1.0
    assert how.rate_at(0.75, 10**6) == pytest.approx(0.55)
    assert how.rate_at(1.0, 10**6) == pytest.approx(0.1)


def test_every_recipe_covers_the_whole_budget_and_folds_its_window_evenly() -> None:
    for name in ("nano", "tiny"):
        how = recipe(name)
        assert how.phases[-1].until == 1.0
        assert [p.until for p in how.phases] == sorted({p.until for p in how.phases})
        assert all(how.window % phase.length == 0 for phase in how.phases)
        assert how.phases[-1].quantise and how.phases[-1].sparse


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="nano, tiny"):
        recipe("huge")


def test_folded_windows_keep_every_prediction_and_its_target() -> None:
    ids = torch.arange(2 * 9).view(2, 9)
    cut = folded(ids, 4)
    assert cut.tolist()[:2] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert torch.equal(cut[:, 1:].reshape(2, 8), ids[:, 1:])


def test_router_bias_rises_for_idle_experts_and_falls_for_busy_ones(tokens: Path) -> None:
    trainer = _trainer(tokens)
    layers = len(trainer.model.plan.layers)
    trainer.ops.counts[:] = [torch.tensor([10, 0, 5, 5]) for _ in range(layers)]
    trainer._balance(rate=1.0)
    step = trainer.recipe.bias_step
    for layer in range(layers):
        bias = trainer.model.block(layer).ffn.gate.bias
        assert bias.tolist() == pytest.approx([-step, step, 0.0, 0.0])


def test_a_config_with_engram_layers_is_refused_before_anything_is_built(tokens: Path) -> None:
    released = preset("v4.1-flash")
    small = replace(
        preset("tiny"), engram_layer_ids=(1,), engram_num_embeddings=(64,), engram_max_ngram_size=3,
        engram_vocab_size=32, engram_n_heads=1, engram_head_dim=32, engram_pad_token_id=2,
        engram_compressed_vocab_size=released.engram_compressed_vocab_size,
    )  # fmt: skip
    how = recipe("tiny")
    batches = TokenBatches(tokens, how.batch, how.window, 1)
    with pytest.raises(ConfigError, match="Engram"):
        Trainer(small, how, batches, kernels=Kernels(), seed=1)


def test_a_damaged_or_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training checkpoint"):
        load_training_state(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_training_state(tmp_path)


def test_a_checkpoint_under_another_seed_is_refused(tokens: Path, tmp_path: Path) -> None:
    _run(_trainer(tokens, seed=5), 1, tmp_path / "run", Budget(tokens=1000))
    with pytest.raises(UsageError, match="seed was 5"):
        _trainer(tokens, seed=6).resume(tmp_path / "run")


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(x).float())
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_muon_gets_hidden_matrices_and_decay_spares_norms_and_mixes(tokens: Path) -> None:
    model = _trainer(tokens).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, decayed, plain = ([names[id(p)] for p in part] for part in split_parameters(model))
    assert all(".attn." in name or ".experts." in name or "shared" in name for name in muon)
    assert not any("indexer" in name or ".gate." in name or "hc_" in name for name in muon)
    assert {"embed.weight", "head.weight"} <= set(decayed)
    assert all("norm" in n or "hc_" in n or "sink" in n for n in plain)
    bias = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert all(name.endswith("gate.bias") for name in bias)
    assert len(muon) + len(decayed) + len(plain) + len(bias) == len(names)


def test_without_muon_all_matrices_go_to_adamw(tokens: Path) -> None:
    model = _trainer(tokens).model
    optimisers = Optimisers(model, lr=1e-3, muon_lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    assert optimisers.muon is None
    count = sum(len(group["params"]) for group in optimisers.adamw.param_groups)
    assert count == sum(1 for p in model.parameters() if p.requires_grad)


def test_index_loss_is_zero_for_a_perfect_student_and_skips_rows_without_choice() -> None:
    teacher = torch.tensor([[0.2, 0.6, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    allowed = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    student = (
        torch.tensor([[0.2, 0.6, 9.0], [5.0, 0.0, 0.0], [1.0, 2.0, 3.0]]).clamp(min=1e-9).log()
    )
    loss, rows = index_loss(student, teacher, allowed)
    assert rows == 1
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    worse, _ = index_loss(torch.zeros(3, 3), teacher, allowed)
    assert worse.item() == pytest.approx(0.25 * torch.log(torch.tensor(0.5)).item()
                                         + 0.75 * torch.log(torch.tensor(1.5)).item())  # fmt: skip


def test_bits_per_byte_divides_by_the_bytes_of_the_text() -> None:
    assert nats_to_bits_per_byte(0.6931472, tokens=100, num_bytes=50) == pytest.approx(2.0)
