"""Names of cached prefixes: the fingerprint of everything rows depend on, and chained block keys.

No torch, no files except `weights_digest`. Equal inputs give equal bytes in every process, whatever
PYTHONHASHSEED is. Called by the scheduler (keys of a request) and by whoever opens a prefix store.

    root    = H(fingerprint)                        one per model and way of computing rows
    start   = H(root, salt)                         one per tenant
    key_0   = H(start, ids of block 0, images that start in it)
    key_i+1 = H(key_i, ids of block i+1, images that start in it)

A key therefore names all tokens from the first one on. H is BLAKE2b with 32 bytes and a different
personalisation for each line above, so that a key of one kind is never one of another kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cedar.config.model_config import ModelConfig
from cedar.errors import RequestError, UsageError
from cedar.formats.headers import read_headers
from cedar.formats.rows import RowFormats

KEY_BYTES = 32

#: Version of the bytes a row consists of and of their order in a block. Raised with either.
ROW_LAYOUT_VERSION = 1

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that the bytes of a row depend on besides the tokens.

    Attributes:
        weights: digest of the weights: `weights_digest(path)`, or the seed of random weights.
        config: canonical text of the model config.
        plan: the layer plan as printed: owners, roles, ratios.
        row_format: widths and bytes of main, index and window rows.
        tokenizer: digest of the tokenizer; b"" where callers send ids only.
        index_key_rule: "corrected" or "as_shipped".
        replay_mode: how windows are rebuilt after a hit and how the decoder is prefilled.
        numerics: dtype of the computation and kernel backend; both change low bits of rows.
        block_size: tokens per block.
        layout_version: version of row and block bytes.
    """

    weights: bytes
    config: str
    plan: str
    row_format: str
    tokenizer: bytes
    index_key_rule: str
    replay_mode: str
    numerics: str
    block_size: int
    layout_version: int = ROW_LAYOUT_VERSION

    @classmethod
    def of(
        cls, config: ModelConfig, *, weights: bytes, tokenizer: bytes, index_key_rule: str,
        replay_mode: str, numerics: str, block_size: int,
    ) -> Fingerprint:  # fmt: skip
        """The fingerprint of a model; config, plan and row format are read from `config`."""
        formats = RowFormats.of(config)
        rows = (formats.main, formats.index, formats.window)
        return cls(
            weights=weights,
            config=_config_text(config),
            plan=config.plan.table(),
            row_format=", ".join(f"{row.kind} {row.width} in {row.row_bytes} B" for row in rows),
            tokenizer=tokenizer,
            index_key_rule=index_key_rule,
            replay_mode=replay_mode,
            numerics=numerics,
            block_size=block_size,
        )

    def root(self) -> bytes:
        """32 bytes; equal exactly if every field is equal."""
        state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"cedar.root")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data = value if isinstance(value, bytes) else str(value).encode()
            state.update(struct.pack("<16sQ", field.name.encode(), len(data)) + data)
        return state.digest()


def _config_text(config: ModelConfig) -> str:
    document = dataclasses.asdict(config)
    # The document a config was read from has the same content in another layout, or no effect.
    for name in ("source", "source_layout"):
        del document[name]
    return json.dumps(document, sort_keys=True)


def weights_digest(path: Path) -> bytes:
    """128-bit digest of all weights of a model directory: headers and every byte of every file.

    Reads the files once; xxh3 runs at memory speed, so the disk decides. Headers alone would not
    do: two trainings of one model differ in nothing else.

    Raises:
        CheckpointError: see `formats.headers.read_headers`.
    """
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    for file in sorted({header.file for header in read_headers(path).values()}):
        state.update(struct.pack("<Q", file.stat().st_size))
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                state.update(buffer[:count])
    return state.digest()


def files_digest(paths: Iterable[Path]) -> bytes:
    """32-byte digest of small files (a tokenizer) in the given order; an absent one counts too."""
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"cedar.files")
    for path in paths:
        data = path.read_bytes() if path.is_file() else None
        name = path.name.encode()
        size = -1 if data is None else len(data)
        state.update(struct.pack("<qq", len(name), size) + name + (data or b""))
    return state.digest()


def chain_start(root: bytes, salt: bytes = b"") -> bytes:
    """Parent of a sequence's first block.

    Args:
        root: `Fingerprint.root()`.
        salt: separates tenants: equal prompts under different salts share nothing.
    """
    if len(root) != KEY_BYTES:
        raise UsageError(f"a fingerprint root has {KEY_BYTES} bytes, this one has {len(root)}")
    return hashlib.blake2b(root + salt, digest_size=KEY_BYTES, person=b"cedar.start").digest()


def next_key(
    parent: bytes, token_ids: Sequence[int], images: Sequence[tuple[int, bytes]] = ()
) -> bytes:
    """Key of the tokens that follow the prefix named `parent`.

    Args:
        parent: key of the prefix before them, or `chain_start`.
        token_ids: the ids of one block; fewer for the open end of a sequence.
        images: (offset in `token_ids`, digest) of every image that starts among them.
    """
    state = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"cedar.block")
    state.update(struct.pack("<QQ", len(token_ids), len(images)))
    try:
        ids = array("q", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids must be whole numbers below 2^63: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    state.update(ids.tobytes())
    for offset, digest in images:
        state.update(struct.pack("<QQ", offset, len(digest)) + digest)
    return state.digest()


def block_keys(
    root: bytes, token_ids: Sequence[int], block_size: int, salt: bytes = b"",
    image_digests: Sequence[tuple[int, bytes]] = (),
) -> list[bytes]:  # fmt: skip
    """Keys of all full blocks of a sequence, first to last; the open rest has none.

    Args:
        root: `Fingerprint.root()`.
        token_ids: ids from position 0 on.
        block_size: tokens per block.
        salt: see `chain_start`.
        image_digests: (position of its first token, digest of its pixels) of each image, ascending.

    Raises:
        UsageError: `block_size` < 1.
        RequestError: image positions are not ascending or lie outside the sequence.
    """
    if block_size < 1:
        raise UsageError(f"block_size={block_size} must be at least 1")
    positions = [position for position, _ in image_digests]
    if positions != sorted(set(positions)):
        raise RequestError(f"image positions {positions} must ascend", param="images")
    if positions and not 0 <= positions[0] <= positions[-1] < len(token_ids):
        raise RequestError(
            f"image positions {positions} must lie in 0..{len(token_ids) - 1}", param="images"
        )
    keys = []
    parent = chain_start(root, salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        images = [(at - start, digest) for at, digest in image_digests if start <= at < end]
        parent = next_key(parent, token_ids[start:end], images)
        keys.append(parent)
    return keys
