"""Reference index scoring: scores, candidate blocks and top-k with a total tie order, plain torch.

Scores are formed in tiles of queries, so memory does not grow with queries x keys. Dot products of
FP4 values are exact in float32 (every term is a multiple of one small unit), so no tiling, batch or
thread count can change a selection.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cedar.formats.codec import decode_rows
from cedar.kernels.operators import PagedRows, Pool, Selection

#: Float32 values of one score tile, all heads included: 64 MB.
_TILE_VALUES = 1 << 24


def index_topk(
    queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor, visible: Tensor, *,
    topk: int, pool: Pool | None,
) -> Selection:  # fmt: skip
    """See `Operators.index_topk`."""
    out = torch.full((queries.shape[0], topk), -1, dtype=torch.int32)
    for rows, scores in _score_tiles(queries, head_weights, keys, sequences, visible):
        if pool is not None:
            allowed = pool_mask(pool.blocks[rows], pool.block_size, scores.shape[1])
            scores = scores.masked_fill(~allowed, float("-inf"))
        out[rows] = positions_of(topk_mask(scores, topk), topk)
    return Selection(out)


def index_pool(
    queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor, visible: Tensor, *,
    topk: int, num_blocks: int, block_size: int,
) -> tuple[Selection, Pool]:  # fmt: skip
    """See `Operators.index_pool`."""
    count = queries.shape[0]
    out = torch.full((count, topk), -1, dtype=torch.int32)
    blocks = torch.full((count, num_blocks), -1, dtype=torch.int32)
    for rows, scores in _score_tiles(queries, head_weights, keys, sequences, visible):
        out[rows] = positions_of(topk_mask(scores, topk), topk)
        kept = block_mask(scores, visible[rows], num_blocks, block_size)
        blocks[rows] = positions_of(kept, num_blocks)
    return Selection(out), Pool(blocks, block_size)


def _score_tiles(
    queries: Tensor, head_weights: Tensor, keys: PagedRows, sequences: Tensor, visible: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (row ids, float32 scores `[rows, keys]`) with invisible keys at -inf."""
    for sequence in sequences.unique().tolist():
        of_sequence = torch.where(sequences == sequence)[0]
        most = int(visible[of_sequence].max())
        if most == 0:
            continue
        key_values = decode_rows(keys.rows[row_numbers(keys, sequence, most)], keys.fmt)
        tile = max(1, _TILE_VALUES // (queries.shape[1] * most))
        for rows in of_sequence.split(tile):
            scores = index_scores(
                decode_rows(queries[rows], keys.fmt), head_weights[rows], key_values
            )
            unseen = torch.arange(most) >= visible[rows].unsqueeze(1)
            yield rows, scores.masked_fill_(unseen, float("-inf"))


def row_numbers(paged: PagedRows, sequence: int, count: int) -> Tensor:
    """Pool rows of the first `count` rows of a sequence, int64."""
    j = torch.arange(count)
    blocks = paged.tables[sequence].long()
    return blocks[j // paged.rows_per_block] * paged.rows_per_block + j % paged.rows_per_block


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """`sum_h w_h * relu(<q_h, k_j>)`: float32 `[N, P, p]`, `[N, P]`, `[n, p]` -> `[N, n]`.

    Heads are added one by one in ascending order, each product rounded before it is added.
    """
    dots = torch.matmul(queries, keys.t()).relu_()
    scores = torch.zeros(queries.shape[0], keys.shape[0])
    for head in range(queries.shape[1]):
        scores = scores + head_weights[:, head, None] * dots[:, head]
    return scores


def topk_mask(scores: Tensor, topk: int) -> Tensor:
    """Bool `[N, n]`: the `topk` best finite scores of each row, ties to the lowest position."""
    reachable = scores > float("-inf")
    if scores.shape[1] <= topk:
        return reachable
    worst_kept = scores.topk(topk, dim=-1).values[:, -1:]
    above = scores > worst_kept
    equal = scores == worst_kept
    room = topk - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & reachable


def block_mask(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Bool `[N, blocks]`: candidate blocks to keep (specification 4.8)."""
    padded = torch.nn.functional.pad(
        scores, (0, -scores.shape[1] % block_size), value=float("-inf")
    )
    best = padded.unflatten(1, (-1, block_size)).amax(-1)
    newest = (visible.long() - 1).div(block_size, rounding_mode="floor")
    pinned = torch.arange(best.shape[1]) == newest.unsqueeze(1)
    return topk_mask(best.masked_fill(pinned, float("inf")), num_blocks)


def pool_mask(blocks: Tensor, block_size: int, count: int) -> Tensor:
    """Candidate block ids `[N, blocks]` to a bool mask over `count` positions."""
    total = -(-count // block_size)
    mask = torch.zeros(blocks.shape[0], total + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(blocks < 0, total, blocks.clamp(max=total)).long(), True)
    return mask[:, :total].repeat_interleave(block_size, 1)[:, :count]


def positions_of(mask: Tensor, width: int) -> Tensor:
    """Ascending column numbers of a bool mask `[N, n]`, int32 `[N, width]`, -1 padded."""
    out = torch.full((mask.shape[0], width), -1, dtype=torch.int32)
    rows, columns = torch.where(mask)
    slots = (mask.cumsum(-1) - 1)[rows, columns]
    out[rows, slots] = columns.to(torch.int32)
    return out
