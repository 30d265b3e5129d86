"""The model that ships with the package: complete, small, loadable, and a trained one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn import functional as F

import cedar
from cedar.config.presets import preset
from cedar.model_directory import resolve_model
from cedar.text.tokenizer import Tokenizer

#: Opening of Persuasion (Jane Austen, 1817), whose whole text was held out of the training.
HELD_OUT = (
    "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, for his own amusement, "
    "never took up any book but the Baronetage; there he found occupation for an idle hour, and "
    "consolation in a distressed one."
)


def _directory() -> Path:
    return resolve_model("nano")


def test_the_directory_is_complete_and_at_most_twelve_megabytes() -> None:
    names = {path.name for path in _directory().iterdir()}
    assert names == {
        "MODEL_CARD.md", "config.json", "generation_config.json", "model.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in _directory().iterdir()) <= 12_000_000


def test_the_config_is_the_preset_of_the_same_name() -> None:
    assert cedar.ModelConfig.from_pretrained(_directory()) == preset("nano")


def test_the_vocabulary_fits_the_embedding_and_the_special_ids() -> None:
    tokenizer, config = Tokenizer.from_directory(_directory()), preset("nano")
    assert tokenizer.vocab_size == config.vocab_size
    assert (tokenizer.bos_id, tokenizer.eos_id) == (config.bos_token_id, config.eos_token_id)
    defaults = json.loads((_directory() / "generation_config.json").read_text(encoding="utf-8"))
    assert defaults["eos_token_id"] == config.eos_token_id


def test_it_predicts_a_held_out_sentence_far_better_than_chance() -> None:
    ids = [0, *Tokenizer.from_directory(_directory()).encode(HELD_OUT)]
    model = cedar.load("nano", kernels="reference")
    logits = model.score(torch.tensor([ids]))[0]
    nats = float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:])))
    # Chance is ln 4096 = 8.3; unseen prose of the period costs it about 4.5.
    assert nats < 5.5
