"""The tokenizer of a checkpoint: text to token ids and back.

Lives here: loading ``tokenizer.json``, the special ids, and the rule that a user's text never
turns into a control token.  Does not live here: chat prompts, streaming
(:mod:`cedar.text.detokenizer`) and training a vocabulary
(:mod:`cedar.training.tokenizer_training`).  Called by the server, the offline API and the training
data tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from cedar.errors import CheckpointError, ConfigError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Encodes text and decodes ids with the byte-level BPE of one checkpoint.

    Every entry of ``added_tokens`` in ``tokenizer.json`` is a control token: :meth:`encode` never
    yields its id, whatever the text says; only :meth:`encode_with_markers` does.

    Args:
        document: the text of a ``tokenizer.json``.
        bos_id, eos_id, pad_id: special ids, None where the checkpoint has none.
        origin: named in error messages.

    Raises:
        CheckpointError: ``document`` is no tokenizer that the ``tokenizers`` library can read.
    """

    def __init__(
        self,
        document: str,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        origin: str = TOKENIZER_FILE,
    ) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{origin} is not a readable tokenizer: {error}") from error
        self._document = document
        self._origin = origin
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.control_ids = frozenset(self._backend.get_added_tokens_decoder())

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Loads the tokenizer of a checkpoint directory.

        Special ids come from ``tokenizer_config.json`` (token texts), else from ``config.json``
        (``bos_token_id`` and so on).

        Raises:
            CheckpointError: ``tokenizer.json`` is missing or damaged.
            ConfigError: a configured special token is unknown, or an id is outside the vocabulary.
        """
        directory = Path(path)
        file = directory / TOKENIZER_FILE
        if not file.is_file():
            raise CheckpointError(
                f"{directory} has no {TOKENIZER_FILE}; a model directory needs one to read and "
                "write text. Copy it from the checkpoint, or pass token ids instead of text."
            )
        tokenizer = cls(file.read_text(encoding="utf-8"), origin=str(file))
        names = _read_json(directory / "tokenizer_config.json")
        numbers = _read_json(directory / "config.json")
        for kind in ("bos", "eos", "pad"):
            setattr(tokenizer, f"{kind}_id", tokenizer._special_id(kind, names, numbers))
        return tokenizer

    def _special_id(self, kind: str, names: dict[str, Any], numbers: dict[str, Any]) -> int | None:
        name = names.get(f"{kind}_token")
        if isinstance(name, dict):  # Hugging Face also writes {"content": ..., "lstrip": ...}
            name = name.get("content")
        if isinstance(name, str):
            token_id = self.token_to_id(name)
            if token_id is None:
                raise ConfigError(
                    f"tokenizer_config.json names {kind}_token {name!r}, which is no entry of "
                    f"{self._origin}"
                )
            return token_id
        number = numbers.get(f"{kind}_token_id")
        if isinstance(number, list):  # several end tokens: the first is the one that is written
            number = number[0] if number else None
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < self.vocab_size:
            raise ConfigError(
                f"config.json: {kind}_token_id {number!r} is not an id of {self._origin} "
                f"(0 to {self.vocab_size - 1})"
            )
        return number

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, control tokens included."""
        # Added tokens may leave gaps, so the count of entries can be below the largest id.
        return max(int(self._backend.get_vocab_size()), max(self.control_ids, default=-1) + 1)

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of one vocabulary entry, as spelled in ``tokenizer.json``, or None."""
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the vocabulary entry of an id, as spelled in ``tokenizer.json``, or None."""
        token = self._backend.id_to_token(token_id)
        return None if token is None else str(token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of ordinary text; what looks like a control token is encoded as text.

        Args:
            text: any string.
            add_special_tokens: put the begin-of-sequence id in front, where the checkpoint has one.
        """
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        if not self.control_ids.isdisjoint(ids):
            ids = list(self._plain_backend.encode(text, add_special_tokens=False).ids)
            if not self.control_ids.isdisjoint(ids):
                raise CheckpointError(
                    f"{self._origin}: its merges build a control token from ordinary text; "
                    "this vocabulary cannot keep user text and control tokens apart"
                )
        return self._with_bos(ids, add_special_tokens)

    def encode_with_markers(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a prompt that we built: control tokens in it become their ids.

        Never call it on text that contains a user's words; join ids of :meth:`encode` instead.
        """
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        return self._with_bos(ids, add_special_tokens)

    def encode_batch_with_markers(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode_with_markers` for many texts at once, on all cores."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids; one that has no vocabulary entry (padding rows of a model's head) is no
                text.
            skip_special_tokens: leave out the tokens that ``tokenizer.json`` marks as special.
        """
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        return [self.bos_id, *ids] if wanted and self.bos_id is not None else ids

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # Only text that spells out a control token needs this second, marker-blind tokenizer.
        document = json.loads(self._document)
        document["added_tokens"] = []
        return tokenizers.Tokenizer.from_str(json.dumps(document))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}, expected an object")
    return document
