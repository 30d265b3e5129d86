"""Export: the files, their formats, and that the packed model computes what the anneal phase trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from training_corpus import write_corpus

from cedar.config.presets import preset
from cedar.config.weight_schema import weight_schema
from cedar.errors import CheckpointError
from cedar.formats.checkpoint import CheckpointReader, to_tag
from cedar.loading import load
from cedar.training.data import TokenBatches
from cedar.training.export import export_model, released_tensors
from cedar.training.kernels import Kernels
from cedar.training.recipes import recipe
from cedar.training.trainer import Trainer

PACKED = replace(preset("tiny"), dense_dtype="fp8", expert_dtype="fp4")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    torch.set_num_threads(1)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_corpus(corpus)
    how = recipe("tiny")
    batches = TokenBatches(corpus / "train.bin", how.batch, how.window, 1)
    return Trainer(PACKED, how, batches, kernels=Kernels(), seed=1, dtype=torch.float32)


def test_every_tensor_of_the_schema_is_written_with_its_dtype_and_shape(
    trainer: Trainer, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    export_model(out, PACKED, trainer.model.state_dict(), tmp_path / "corpus")
    schema = list(weight_schema(PACKED))
    with CheckpointReader(out, schema) as reader:  # checks names, shapes and dtypes
        assert {to_tag(reader.tensor(spec.name)) for spec in schema} == {
            "BF16", "F32", "F8_E4M3", "F8_E8M0", "I8",
        }  # fmt: skip
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (out / name).is_file()


def test_the_exported_model_has_the_loss_of_the_anneal_phase(
    trainer: Trainer, tmp_path: Path
) -> None:
    phase = trainer.recipe.phases[-1]
    for _ in range(5):
        trainer.update(phase, 0.5)
    masters = dict(trainer.model.named_parameters())
    with torch.no_grad():  # what the file stores in bfloat16; the packed weights round in the pass
        for spec in weight_schema(PACKED):
            if spec.tag == "BF16":
                masters[spec.name].copy_(masters[spec.name].bfloat16())
    ids = next(trainer.batches)
    with torch.no_grad():
        trained = float(trainer.losses(ids, phase, teach=False)[0])
    out = tmp_path / "model"
    export_model(out, PACKED, trainer.model.state_dict(), tmp_path / "corpus")
    logits = load(out, kernels="reference", dtype="float32").score(ids[:, :-1])
    exported = float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    assert exported == pytest.approx(trained, abs=1e-3)


def test_a_checkpoint_of_another_model_is_refused_by_name(trainer: Trainer) -> None:
    masters = trainer.model.state_dict()
    del masters["layers.0.attn.wkv.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.weight"):
        released_tensors(PACKED, masters)


def test_an_export_without_a_tokenizer_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        export_model(tmp_path / "model", PACKED, trainer.model.state_dict(), tmp_path)
