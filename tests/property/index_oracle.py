"""Random index keys and what must be selected from them, in exact fractions. No tests here."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from cedar.formats.codec import decode_rows
from cedar.formats.rows import RowFormat
from cedar.kernels.operators import PagedRows
from cedar.kernels.reference import ReferenceOperators

FMT = RowFormat("index", 32)


class Keys:
    """Random packed keys of several sequences in shuffled blocks, and packed queries.

    Args:
        lengths: keys of each sequence.   levels: distinct magnitudes; few make many ties.
    """

    def __init__(
        self, lengths: list[int], *, heads: int = 2, levels: int = 3, seed: int = 0
    ) -> None:
        generator = np.random.default_rng(seed)
        self.per_block, self.lengths = 4, lengths
        blocks = [-(-n // 4) + 1 for n in lengths]
        order = generator.permutation(sum(blocks))
        tables = np.zeros((len(lengths), max(blocks)), dtype=np.int32)
        start = 0
        for s, count in enumerate(blocks):
            tables[s, :count] = order[start : start + count]
            start += count
        # Few distinct small integers: FP4 holds them exactly, and equal scores are frequent.
        values = generator.integers(0, levels, (sum(blocks) * 4, 32)) * generator.integers(
            0, 2, (sum(blocks) * 4, 1)
        )
        self.rows = ReferenceOperators().pack_rows(torch.from_numpy(values).float(), FMT)
        self.tables = torch.from_numpy(tables)
        self.heads, self.generator = heads, generator

    def paged(self) -> PagedRows:
        return PagedRows(self.rows, self.tables, self.per_block, FMT)

    def queries(self, count: int) -> tuple[Tensor, Tensor]:
        """Packed queries `[count, P, bytes]` and head weights, some negative."""
        values = self.generator.integers(-2, 3, (count, self.heads, 32))
        weights = self.generator.integers(-2, 4, (count, self.heads)) / 4
        packed = ReferenceOperators().pack_rows(torch.from_numpy(values).float(), FMT)
        return packed, torch.from_numpy(weights).float()

    def scores(self, query: Tensor, weights: Tensor, sequence: int, visible: int) -> list[Fraction]:
        """Exact scores of the visible keys of one query."""
        q = decode_rows(query, FMT).tolist()
        scores = []
        for j in range(visible):
            row = int(self.tables[sequence, j // 4]) * 4 + j % 4
            key = [Fraction(v) for v in decode_rows(self.rows[row], FMT).tolist()]
            score = Fraction(0)
            for head, weight in enumerate(weights.tolist()):
                dot = sum((Fraction(a) * b for a, b in zip(q[head], key, strict=True)), Fraction(0))
                score += Fraction(weight) * max(dot, Fraction(0))
            scores.append(score)
        return scores


def best(scores: list[Fraction], count: int, allowed: set[int] | None = None) -> list[int]:
    """Positions of the best scores, ties to the lowest position, ascending."""
    reach = [j for j in range(len(scores)) if allowed is None or j in allowed]
    return sorted(sorted(reach, key=lambda j: (-scores[j], j))[:count])


def best_blocks(scores: list[Fraction], count: int, size: int) -> list[int]:
    blocks = range(-(-len(scores) // size))
    if not blocks:
        return []
    newest = (len(scores) - 1) // size
    value = {b: max(scores[b * size : (b + 1) * size]) for b in blocks}
    return sorted(sorted(blocks, key=lambda b: (b != newest, -value[b], b))[:count])


def used(rows: Tensor) -> list[list[int]]:
    """Used slots; they must be ascending and unused slots last."""
    out = []
    for row in rows.tolist():
        kept = [p for p in row if p >= 0]
        assert row == sorted(set(kept)) + [-1] * (len(row) - len(kept))
        out.append(kept)
    return out
