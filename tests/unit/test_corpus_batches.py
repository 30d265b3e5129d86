"""Pins token files and batches: what is written, what a window holds, and exact resumption."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from cedar.errors import UsageError
from cedar.text.tokenizer import Tokenizer
from cedar.training.data import TokenBatches, TokenFile, index_path, tokenize_corpus
from cedar.training.tokenizer_training import train_tokenizer

RECORDS = [
    {"source": "book", "id": "long", "text": "the sea and the ship and the whale " * 30},
    {"source": "chat", "id": "é", "text": "<|user|>hé<|end|><|assistant|>yes<|end|>"},
    *(
        {"source": "book", "id": f"b{i}", "text": f"the whale number {i} " * (i + 1)}
        for i in range(12)
    ),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((str(record["text"]) for record in RECORDS), 285, path / "tokenizer.json")
    return Tokenizer.from_directory(path)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (path / "train.jsonl").write_text(lines, encoding="utf-8")
    tokenize_corpus(path / "train.jsonl", tokenizer, path / "train.bin")
    return path / "train.bin"


def test_every_document_is_written_between_bos_and_eos(
    token_file: Path, tokenizer: Tokenizer
) -> None:
    file = TokenFile(token_file)
    assert [entry.id for entry in file.documents] == [record["id"] for record in RECORDS]
    for number, record in enumerate(RECORDS):
        ids = file.document(number).tolist()
        assert ids == [0, *tokenizer.encode_with_markers(str(record["text"])), 1]
    assert sum(entry.tokens for entry in file.documents) == len(file.ids)


def test_bytes_are_counted_without_control_tokens_and_totals_by_source(token_file: Path) -> None:
    index = json.loads(index_path(token_file).read_text(encoding="utf-8"))
    assert index["documents"][1]["bytes"] == len("héyes".encode())
    for source, total in index["sources"].items():
        entries = [entry for entry in index["documents"] if entry["source"] == source]
        assert total["documents"] == len(entries)
        assert total["tokens"] == sum(entry["tokens"] for entry in entries)
        assert total["bytes"] == sum(entry["bytes"] for entry in entries)


def test_a_batch_holds_windows_of_one_more_id_than_positions(token_file: Path) -> None:
    batch = next(TokenBatches(token_file, batch_size=3, sequence_length=8, seed=0))
    assert batch.shape == (3, 9)
    assert batch.dtype == torch.int64


def test_windows_are_runs_of_whole_documents_joined_end_to_start(token_file: Path) -> None:
    documents = [TokenFile(token_file).document(n).tolist() for n in range(len(RECORDS))]
    batches = TokenBatches(token_file, batch_size=2, sequence_length=40, seed=3)
    for _ in range(batches.batches_per_epoch):
        for window in next(batches).tolist():
            pieces = "\n".join(str(i) for i in window).replace("1\n0\n", "1|0\n").split("|")
            joined = [[int(i) for i in piece.split()] for piece in pieces]
            for position, piece in enumerate(joined):
                starts, ends = position > 0, position < len(joined) - 1
                assert any(
                    piece == document[place : place + len(piece)]
                    and (place == 0 or not starts)
                    and (place + len(piece) == len(document) or not ends)
                    for document in documents
                    for place in range(len(document))
                )


def test_no_id_is_predicted_twice_in_an_epoch_and_few_are_left_out(token_file: Path) -> None:
    batches = TokenBatches(token_file, batch_size=2, sequence_length=8, seed=5)
    available = Counter(TokenFile(token_file).ids.tolist())
    predicted = Counter(
        i for _ in range(batches.batches_per_epoch) for i in next(batches)[:, 1:].flatten().tolist()
    )
    assert predicted <= available
    assert available.total() - predicted.total() < 8 + 2 * 8 + 8


def test_windows_of_one_book_are_not_dealt_out_in_its_order(token_file: Path) -> None:
    batches = TokenBatches(token_file, batch_size=20, sequence_length=8, seed=5)
    batch = next(batches)
    follows = (batch[:-1, -1] == batch[1:, 0]).sum()  # windows that follow overlap by one id
    assert follows < 10


def test_order_depends_on_the_seed_and_the_epoch_only(token_file: Path) -> None:
    first, same, other = (TokenBatches(token_file, 4, 16, seed=seed) for seed in (1, 1, 2))
    epoch = [next(first) for _ in range(first.batches_per_epoch)]
    assert all(torch.equal(next(same), batch) for batch in epoch)
    assert not torch.equal(next(other), epoch[0])
    assert not torch.equal(next(first), epoch[0])


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_resumed_run_sees_the_same_next_batches(token_file: Path, taken: int) -> None:
    original = TokenBatches(token_file, 4, 16, seed=1)
    for _ in range(taken):
        next(original)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = TokenBatches(token_file, 4, 16, seed=1)
    next(resumed)
    resumed.load_state_dict(state)
    for _ in range(resumed.batches_per_epoch + 1):
        assert torch.equal(next(resumed), next(original))


def test_a_state_of_another_run_is_refused(token_file: Path) -> None:
    state = TokenBatches(token_file, 4, 16, seed=1).state_dict()
    with pytest.raises(UsageError, match="seed was 1, now it is 2"):
        TokenBatches(token_file, 4, 16, seed=2).load_state_dict(state)


def test_batches_may_be_restricted_to_a_source(token_file: Path) -> None:
    file = TokenFile(token_file)
    batches = TokenBatches(token_file, 1, 4, seed=0, sources=["chat"])
    chat = set(file.document(1).tolist())
    assert set(next(batches).flatten().tolist()) <= chat
    with pytest.raises(UsageError, match="'poem'"):
        TokenBatches(token_file, 1, 4, seed=0, sources=["poem"])


def test_too_few_ids_for_one_batch_are_refused(token_file: Path) -> None:
    with pytest.raises(UsageError, match="too few for one batch"):
        TokenBatches(token_file, 64, 512, seed=0)


def test_a_truncated_token_file_is_refused(token_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "train.bin"
    copy.write_bytes(token_file.read_bytes()[:-2])
    index_path(copy).write_bytes(index_path(token_file).read_bytes())
    with pytest.raises(UsageError, match="tokenize the corpus again"):
        TokenFile(copy)
    index_path(copy).unlink()
    with pytest.raises(UsageError, match="does not exist"):
        TokenFile(copy)


def test_a_tokenizer_without_bos_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    nameless = Tokenizer(tokenizer._document, eos_id=1)
    (tmp_path / "a.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="bos"):
        tokenize_corpus(tmp_path / "a.jsonl", nameless, tmp_path / "a.bin")


def test_ids_are_stored_as_little_endian_uint16(token_file: Path) -> None:
    assert np.fromfile(token_file, dtype="<u2")[0] == 0
    assert token_file.stat().st_size == 2 * len(TokenFile(token_file).ids)
