"""`cedar train`: budget rules, messages, a whole small run with export, stop and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_cli import cedar
from training_corpus import write_corpus, write_token_file

from cedar.errors import CheckpointError, UsageError
from cedar.loading import load
from cedar.training.session import Session, SessionOptions
from cedar.training.trainer import Budget


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    directory = tmp_path / "corpus"
    directory.mkdir()
    return write_corpus(directory)


def _options(corpus: Path, out: Path, tokens: int, *, resume: bool = False) -> SessionOptions:
    budget = Budget(tokens=tokens)
    return SessionOptions("tiny", corpus, out, budget, compiled=False, resume=resume)


@pytest.mark.parametrize("budget", [(), ("--minutes", "1", "--tokens", "9"), ("--tokens", "0")])
def test_anything_but_one_positive_budget_is_a_usage_error(
    corpus: Path, tmp_path: Path, budget: tuple[str, ...]
) -> None:
    out = str(tmp_path / "run")
    done = cedar("train", "tiny", "--data", str(corpus), "--out", out, *budget)
    assert done.returncode == 2
    assert "budget" in done.stderr
    assert done.stdout == ""


def test_a_missing_corpus_says_which_file_and_how_to_make_it(tmp_path: Path) -> None:
    done = cedar(
        "train", "tiny", "--data", str(tmp_path), "--out", str(tmp_path / "r"), "--tokens", "9"
    )
    assert done.returncode == 2
    assert "train.bin" in done.stderr


def test_a_run_ends_with_a_loadable_model_and_a_json_account(corpus: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    done = cedar(
        "train", "tiny", "--data", str(corpus), "--out", str(tmp_path / "run"), "--tokens", "640",
        "--export", str(model), "--threads", "1", "--no-compile", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["tokens"] >= 640
    assert 1.0 < record["held_out_nats_per_token"] < 4.5
    assert record["exported"] == str(model)
    assert "held-out" in done.stderr
    logits = load(model, kernels="reference").score(torch.tensor([[0, 5, 7]]))
    assert logits.shape == (1, 3, 64)


def test_a_stopped_run_leaves_a_checkpoint_that_resumes_and_is_not_overwritten(
    corpus: Path, tmp_path: Path
) -> None:
    out, lines = tmp_path / "run", []
    assert Session(_options(corpus, out, 256)).run(lines.append, lambda: True) is False
    with pytest.raises(UsageError, match="--resume"):
        Session(_options(corpus, out, 256))
    resumed = Session(_options(corpus, out, 256, resume=True))
    assert resumed.trainer.step == 1
    assert resumed.run(lines.append, lambda: False) is True


def test_resuming_without_a_checkpoint_is_an_error(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training checkpoint"):
        Session(_options(corpus, tmp_path / "none", 64, resume=True))


def test_a_corpus_with_too_many_ids_for_the_model_is_refused(corpus: Path, tmp_path: Path) -> None:
    write_token_file(corpus / "train.bin", tokens=2_000, seed=1)
    index = corpus / "train.index.json"
    document = json.loads(index.read_text(encoding="utf-8")) | {"vocab_size": 65}
    index.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError, match="65 ids"):
        Session(_options(corpus, tmp_path / "run", 64))
