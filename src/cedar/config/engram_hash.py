"""Engram constants and n-gram hashes: primes, multipliers, offsets, row numbers. numpy, no torch.

Everything is a pure function of the config and of token ids (specification 4.11). Called by
`model/engram.py`; the compressed token map comes from `text/token_map.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt

from cedar.config.model_config import ModelConfig
from cedar.errors import ConfigError

#: Marks positions without a usable token (image spans) in compressed ids.
DEAD = -1

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EngramHash:
    """Hash constants of all Engram layers of a model.

    Attributes:
        primes: `[layers, orders, heads]`, orders 2 .. max n-gram.
        offsets: `[layers, orders * heads]`, first row of each column, order-major.
        multipliers: `[layers, max n-gram]`, one per look-back.
        pad_id: compressed id that stands for missing tokens.
    """

    primes: Int64
    offsets: Int64
    multipliers: Int64
    pad_id: int

    @property
    def lookback(self) -> int:
        """Tokens before a position that its hash needs."""
        return int(self.multipliers.shape[1]) - 1

    def rows(self, compressed: Int64) -> Int64:
        """Table rows of each position.

        Args:
            compressed: `[T + lookback]` compressed ids; the first `lookback` are the ids before
                the first position, `DEAD` where there is none (start of the sequence, images).
        Returns: int64 `[T, layers, orders * heads]`.
        """
        reach = self.lookback
        count = compressed.shape[0] - reach
        alive = np.ones(count, dtype=bool)
        hashed = np.zeros((self.multipliers.shape[0], count), dtype=np.int64)
        columns = []
        for back in range(reach + 1):
            ids = compressed[reach - back : reach - back + count]
            alive &= ids != DEAD  # sticky: everything behind a dead token is padding too
            term = np.where(alive, ids, self.pad_id) * self.multipliers[:, back, None]
            hashed = term if back == 0 else hashed ^ term
            if back:
                columns.append(hashed[:, :, None] % self.primes[:, back - 1, None, :])
        rows = np.concatenate(columns, axis=-1) + self.offsets[:, None, :]
        return np.ascontiguousarray(rows.transpose(1, 0, 2))


def engram_hash(config: ModelConfig, pad_id: int) -> EngramHash:
    """Derive the constants of a config.

    Args:
        pad_id: compressed id of `engram_pad_token_id`.

    Raises:
        ConfigError: the derived row counts differ from `engram_num_embeddings`.
    """
    assert config.engram_max_ngram_size and config.engram_n_heads and config.engram_vocab_size
    assert config.engram_compressed_vocab_size
    orders = config.engram_max_ngram_size - 1
    layers = len(config.engram_layer_ids)
    primes = _distinct_primes(config.engram_vocab_size, layers * orders, config.engram_n_heads)
    primes = primes.reshape(layers, orders, config.engram_n_heads)
    flat = primes.reshape(layers, -1)
    sums = tuple(int(total) for total in flat.sum(axis=1))
    if sums != config.engram_num_embeddings:
        raise ConfigError(
            f"engram_num_embeddings={list(config.engram_num_embeddings)} does not match the primes "
            f"derived from engram_vocab_size={config.engram_vocab_size}, which sum to {list(sums)}"
        )
    offsets = np.cumsum(flat, axis=1) - flat
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    multipliers = np.stack(
        [
            2 * np.random.default_rng(10007 * layer).integers(0, bound, orders + 1, dtype=np.int64)
            + 1
            for layer in config.engram_layer_ids
        ]
    )
    return EngramHash(primes, offsets, multipliers, pad_id)


def _distinct_primes(start: int, runs: int, heads: int) -> Int64:
    """`runs` x `heads` primes: each run searches upward from `start` for unused ones."""
    used: set[int] = set()
    out = []
    for _ in range(runs):
        candidate = start - 1
        for _ in range(heads):
            candidate += 1
            while candidate in used or not _is_prime(candidate):
                candidate += 1
            used.add(candidate)
            out.append(candidate)
    return np.array(out, dtype=np.int64)


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    return n % 2 == 1 and all(n % d for d in range(3, isqrt(n) + 1, 2))
