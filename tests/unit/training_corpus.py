"""A token file for training tests: a small language that a tiny model learns in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VOCAB = 64


def write_token_file(path: Path, *, tokens: int, seed: int) -> None:
    """Documents of 200 ids in which every id is followed by one of two others."""
    random = np.random.default_rng(seed)
    documents, ids = [], []
    for number in range(tokens // 200):
        row = [0, 3 + int(random.integers(VOCAB - 3))]
        while len(row) < 199:
            row.append(3 + (7 * row[-1] + int(random.integers(2))) % (VOCAB - 3))
        row.append(1)
        documents.append(
            {"source": "made", "id": str(number), "offset": len(ids), "tokens": 200, "bytes": 600}
        )
        ids += row
    np.array(ids, dtype="<u2").tofile(path)
    index = {"vocab_size": VOCAB, "tokens": len(ids), "sources": {}, "documents": documents}
    path.with_suffix(".index.json").write_text(json.dumps(index), encoding="utf-8")


def write_corpus(directory: Path) -> Path:
    """`train.bin`, `heldout.bin` and a stand-in tokenizer; returns the directory."""
    write_token_file(directory / "train.bin", tokens=20_000, seed=1)
    write_token_file(directory / "heldout.bin", tokens=2_000, seed=2)
    (directory / "tokenizer.json").write_text("{}\n", encoding="utf-8")
    return directory
