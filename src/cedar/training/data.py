"""Token files and training batches.

Lives here: turning a corpus (one JSON document per line) into a flat file of uint16 ids with an
index of its documents, and the resumable batch iterator over it.  Does not live here: fetching and
cleaning text (:mod:`cedar.training.corpus`) and the loss.  Called by the corpus tools and the
trainer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cedar.errors import UsageError
from cedar.text.tokenizer import Tokenizer
from cedar.training.tokenizer_training import CONTROL_TOKENS

IdArray = npt.NDArray[np.uint16]
_BATCH_BYTES = 4_000_000  # text encoded per call: bounds memory, keeps both cores busy


@dataclass(frozen=True)
class DocumentEntry:
    """One document of a token file.

    Attributes:
        source, id: as in the corpus.
        offset: place of its first id (begin-of-sequence) in the file, in ids.
        tokens: its length in ids, begin- and end-of-sequence included.
        bytes: UTF-8 bytes of its text without control tokens: the divisor of bits per byte.
    """

    source: str
    id: str
    offset: int
    tokens: int
    bytes: int


def index_path(bin_path: str | Path) -> Path:
    """Returns the path of the index that lies beside a token file."""
    return Path(bin_path).with_suffix(".index.json")


def tokenize_corpus(jsonl: str | Path, tokenizer: Tokenizer, out: str | Path) -> dict[str, Any]:
    """Encodes a corpus once: ``out`` gets the ids, ``index_path(out)`` its documents and totals.

    Every document is written as bos, its ids, eos.  Control tokens in the text (turn markers)
    become their ids.

    Args:
        jsonl: one ``{"source", "id", "text"}`` per line.
        tokenizer: with bos and eos, at most 65,536 ids.
        out: the token file, little-endian uint16.

    Returns:
        Totals: ``{source: {"documents", "tokens", "bytes"}}``, as in the index.

    Raises:
        UsageError: the tokenizer has no bos or eos, or more ids than uint16 holds.
    """
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise UsageError("tokenize_corpus needs a tokenizer with a bos and an eos token")
    if tokenizer.vocab_size > 1 << 16:
        raise UsageError(f"{tokenizer.vocab_size} ids do not fit uint16 (at most {1 << 16})")
    control = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))
    documents: list[DocumentEntry] = []
    totals: dict[str, dict[str, int]] = {}
    offset = 0
    with Path(out).open("wb") as file:
        for batch in _batches_of_records(Path(jsonl)):
            encoded = tokenizer.encode_batch_with_markers([record["text"] for record in batch])
            for record, ids in zip(batch, encoded, strict=True):
                row = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype="<u2")
                size = len(control.sub("", record["text"]).encode("utf-8"))
                entry = DocumentEntry(record["source"], record["id"], offset, len(row), size)
                documents.append(entry)
                total = totals.setdefault(entry.source, {"documents": 0, "tokens": 0, "bytes": 0})
                total["documents"] += 1
                total["tokens"] += entry.tokens
                total["bytes"] += entry.bytes
                row.tofile(file)
                offset += len(row)
    index = {
        "vocab_size": tokenizer.vocab_size,
        "tokens": offset,
        "sources": totals,
        "documents": [asdict(entry) for entry in documents],
    }
    index_path(out).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return totals


def _batches_of_records(jsonl: Path) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    size = 0
    with jsonl.open(encoding="utf-8") as lines:
        for line in lines:
            batch.append(json.loads(line))
            size += len(line)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class TokenFile:
    """A token file and its index, mapped and never copied as a whole.

    Raises:
        UsageError: the file or its index is missing, or they disagree about the length.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        for needed in (self.path, index_path(path)):
            if not needed.is_file():
                raise UsageError(f"{needed} does not exist; write it with tokenize_corpus")
        index = json.loads(index_path(path).read_text(encoding="utf-8"))
        self.documents = [DocumentEntry(**entry) for entry in index["documents"]]
        self.vocab_size = int(index["vocab_size"])
        if self.path.stat().st_size != 2 * index["tokens"]:
            raise UsageError(
                f"{self.path} has {self.path.stat().st_size} bytes, its index asks for "
                f"{2 * index['tokens']}; tokenize the corpus again"
            )
        self.ids: IdArray = np.memmap(self.path, dtype="<u2", mode="r")

    def document(self, number: int) -> IdArray:
        """Returns the ids of one document, begin- and end-of-sequence included."""
        entry = self.documents[number]
        return self.ids[entry.offset : entry.offset + entry.tokens]


class TokenBatches:
    """Endless, deterministic, resumable batches of packed windows.

    Each epoch puts the documents in a new random order, joins them to one stream, cuts the stream
    from a random phase into windows that overlap by one id, and deals the windows out in random
    order.  A window is a run of one document or passes from the end of one (eos) to the start of
    the next (bos); no id is predicted twice in an epoch.  Windows that do not fill the last batch
    are left out; the next epoch cuts elsewhere.

    Args:
        path: a file of :func:`tokenize_corpus`.
        batch_size: windows per batch, B.
        sequence_length: predicted positions per window, T.
        seed: fixes all orders.
        sources: names of the sources to use; None means all.

    Raises:
        UsageError: an unknown source, or too few ids for one batch.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int,
        sequence_length: int,
        seed: int,
        sources: Sequence[str] | None = None,
    ) -> None:
        self._file = TokenFile(path)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.seed = seed
        known = {entry.source for entry in self._file.documents}
        if sources is not None and not set(sources) <= known:
            raise UsageError(f"sources {sorted(sources)}: {path} has {sorted(known)}")
        self.sources = sorted(known if sources is None else set(sources))
        chosen = [entry for entry in self._file.documents if entry.source in self.sources]
        self._offsets = np.array([entry.offset for entry in chosen], dtype=np.int64)
        self._lengths = np.array([entry.tokens for entry in chosen], dtype=np.int64)
        # The longest phase costs T-1 ids, so this many batches fit whatever the phase.
        usable = (int(self._lengths.sum()) - sequence_length) // sequence_length
        self.batches_per_epoch = usable // batch_size
        if self.batches_per_epoch < 1:
            raise UsageError(
                f"{path} has {int(self._lengths.sum())} ids: too few for one batch of "
                f"{batch_size} x {sequence_length}"
            )
        self._position = 0  # batches handed out since the start
        self._epoch = -1  # the epoch that the arrays below describe
        self._order = self._starts = self._windows = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        """Returns the next batch, int64 ``[B, T + 1]``: inputs ``[:, :-1]``, then one id later."""
        epoch, place = divmod(self._position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._start_epoch(epoch)
        first = place * self.batch_size
        starts = self._windows[first : first + self.batch_size]
        batch = np.stack([self._window(int(start)) for start in starts])
        self._position += 1
        return torch.from_numpy(batch)

    def _start_epoch(self, epoch: int) -> None:
        random = np.random.default_rng((self.seed, epoch))
        self._order = random.permutation(len(self._lengths))
        self._starts = np.concatenate(([0], np.cumsum(self._lengths[self._order])))
        phase = int(random.integers(self.sequence_length))
        count = (int(self._starts[-1]) - 1 - phase) // self.sequence_length
        self._windows = phase + random.permutation(count) * self.sequence_length
        self._epoch = epoch

    def _window(self, start: int) -> npt.NDArray[np.int64]:
        window = np.empty(self.sequence_length + 1, dtype=np.int64)
        filled = 0
        place = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < len(window):
            document = self._order[place]
            skip = start + filled - int(self._starts[place])
            take = min(int(self._lengths[document]) - skip, len(window) - filled)
            begin = int(self._offsets[document]) + skip
            window[filled : filled + take] = self._file.ids[begin : begin + take]
            filled += take
            place += 1
        return window

    def _identity(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "sources": self.sources,
            "tokens": int(self._lengths.sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data from which :meth:`load_state_dict` resumes at the next batch."""
        return {**self._identity(), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes at the batch after the last one handed out when ``state`` was taken.

        Raises:
            UsageError: the state belongs to other data, another seed or another batch shape.
        """
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise UsageError(
                    f"cannot resume: {name} was {state.get(name)!r}, now it is {mine!r}"
                )
        self._position = int(state["position"])
