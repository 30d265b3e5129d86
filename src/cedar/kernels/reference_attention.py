"""Reference sparse attention: gather, dequantise, softmax with a sink, plain torch.

Queries are taken in tiles, so the gathered rows of one tile bound the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.codec import decode_rows
from cedar.kernels.operators import PagedRows, Selection, WindowRows

#: Float32 values gathered for one tile of queries: 16 MB. Twice that and the C library returns the
#: memory to the system after every tile; the page faults then cost more than the arithmetic.
_TILE_VALUES = 1 << 22


def sparse_attention(
    q: Tensor, window: WindowRows, selected: PagedRows | None, selection: Selection | None,
    sequences: Tensor, sink: Tensor, *, scale: float, q_selected: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `Operators.sparse_attention`."""
    count, _, width = q.shape
    out = torch.empty_like(q)
    out_selected = None if q_selected is None else torch.empty_like(q)
    entries = int((window.hi - window.lo + 1).clamp(min=0).max()) if count else 0
    if selection is not None:
        entries += selection.positions.shape[1]
    tile = max(1, _TILE_VALUES // max(1, entries * width))
    for rows in torch.arange(count).split(tile):
        near, near_mask = _window_numbers(window, rows)
        far, far_mask = near[:, :0], near_mask[:, :0]
        if selected is not None and selection is not None:
            far, far_mask = _selected_numbers(selected, selection, sequences, rows)
        split, mask = near.shape[1], torch.cat((near_mask, far_mask), 1)
        values = torch.zeros(*mask.shape, width)
        _decode_distinct(window, near, near_mask, values[:, :split])
        if selected is not None:
            _decode_distinct(selected, far, far_mask, values[:, split:])
        other = None if q_selected is None else q_selected[rows]
        near_out, far_out = attend(
            q[rows], values, mask, sink, scale=scale, split=split, other=other
        )
        out[rows] = near_out
        if out_selected is not None and far_out is not None:
            out_selected[rows] = far_out
    return out, out_selected


def attend(
    q: Tensor, values: Tensor, mask: Tensor, sink: Tensor, *, scale: float, split: int = 0,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Softmax attention with keys = values and a sink logit per head.

    In bfloat16 the probabilities are rounded before they weigh the values, as the reference
    program does; the denominator is summed from the unrounded ones.

    Args:
        q: `[n, H, d]`.   values: float32 `[n, E, d]`.   mask: bool `[n, E]`, true = visible.
        split: number of window entries, the first ones.   other: queries for the entries after
            `split`; then the two parts of the output are returned apart.
    """
    if values.shape[1] == 0:
        return torch.zeros_like(q), None if other is None else torch.zeros_like(other)
    scores = torch.einsum("nhd,ned->nhe", q.float(), values)
    if other is not None:
        tail = torch.einsum("nhd,ned->nhe", other.float(), values[:, split:])
        scores = torch.cat((scores[..., :split], tail), -1)
    scores = (scores * scale).masked_fill(~mask.unsqueeze(1), float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - top)
    denominator = weights.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - top)
    weights = weights.to(q.dtype).float()
    if other is None:
        return (torch.einsum("nhe,ned->nhd", weights, values) / denominator).to(q.dtype), None
    near = torch.einsum("nhe,ned->nhd", weights[..., :split], values[:, :split]) / denominator
    far = torch.einsum("nhe,ned->nhd", weights[..., split:], values[:, split:]) / denominator
    return near.to(q.dtype), far.to(q.dtype)


def _window_numbers(window: WindowRows, rows: Tensor) -> tuple[Tensor, Tensor]:
    lo, hi = window.lo[rows].long(), window.hi[rows].long()
    width = int((hi - lo + 1).clamp(min=0).max()) if rows.numel() else 0
    positions = lo.unsqueeze(1) + torch.arange(width)
    mask = positions <= hi.unsqueeze(1)
    return window.base[rows].unsqueeze(1) + positions % window.modulus, mask


def _selected_numbers(
    paged: PagedRows, selection: Selection, sequences: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    positions = selection.positions[rows].long()
    mask = positions >= 0
    safe = positions.clamp(min=0)
    per_block = paged.rows_per_block
    blocks = paged.tables[sequences[rows].long()].long().gather(1, safe // per_block)
    return blocks * per_block + safe % per_block, mask


def _decode_distinct(
    source: PagedRows | WindowRows, numbers: Tensor, mask: Tensor, values: Tensor
) -> None:
    """Dequantise each used row once into `values [n, E, d]`; the rows of unused slots are not read."""
    distinct, inverse = numbers[mask].unique(return_inverse=True)
    values[mask] = decode_rows(source.rows[distinct], source.fmt)[inverse]
