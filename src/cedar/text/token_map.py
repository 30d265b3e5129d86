"""Compressed token map of Engram: ids whose text differs only in case, accents or spacing share an id.

Called when a model with Engram layers is loaded. Rules: specification 4.11 (a).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from cedar.errors import CheckpointError

_SPACES = re.compile(r"[ \t\r\n]+")
_ONLY_SPACE = "\ue000"


def normalise_token(text: str, raw: str) -> str:
    """The key a token is merged by.

    Args:
        text: the token decoded alone, specials included.   raw: the tokenizer's own token string.
    """
    if "\ufffd" in text:
        return raw
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if not unicodedata.combining(c)).lower()
    folded = _SPACES.sub(" ", folded)
    folded = _ONLY_SPACE if folded == " " else folded
    return folded.strip().replace(_ONLY_SPACE, " ") or text


def compress_ids(texts: Sequence[str], raws: Sequence[str]) -> npt.NDArray[np.int64]:
    """Consecutive ids in first-seen order, one per token id."""
    seen: dict[str, int] = {}
    keys = (normalise_token(text, raw) for text, raw in zip(texts, raws, strict=True))
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def token_map(
    tokenizer_json: Path, *, vocab_size: int, expected_size: int
) -> npt.NDArray[np.int64]:
    """Map of every token id to its compressed id.

    Args:
        vocab_size: ids the model may be given; the tokenizer must know them all.
        expected_size: compressed ids, as the config states.

    Raises:
        CheckpointError: the file is missing or damaged, knows too few ids, or compresses to another
            size: every hash multiplier depends on it, so a different tokenizer reads wrong rows.
    """
    if not tokenizer_json.is_file():
        raise CheckpointError(f"{tokenizer_json} does not exist; Engram layers need the tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{tokenizer_json} is not a tokenizer: {error}") from None
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    if len(ids) < vocab_size:
        raise CheckpointError(
            f"{tokenizer_json} has {len(ids)} tokens, fewer than vocab_size={vocab_size}: Engram "
            f"layers need the text of every id; this is not the tokenizer of the model"
        )
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    raws = [tokenizer.id_to_token(i) or "" for i in ids]
    compressed = compress_ids(texts, raws)
    size = int(compressed.max()) + 1
    if size != expected_size:
        raise CheckpointError(
            f"{tokenizer_json} compresses to {size} ids but engram_compressed_vocab_size="
            f"{expected_size}: this is not the tokenizer the model was trained with"
        )
    return compressed
