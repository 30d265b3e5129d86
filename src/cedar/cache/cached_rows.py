"""`CachedRows`: the rows of one call over packed pools and rings. Implements `model.kv.Rows`.

Created per call by `engine/loaded_model.py`. Selections and the candidate pool live here for the
length of the call and are handed from an index source to the layers that reuse them.

Window rows of a call with several tokens per sequence sit in one linear buffer,

    | ring rows start-W+1 .. start-1 | new rows start .. end-1 |  per sequence,

and the last W of them go back to the ring; a call with one token per sequence writes its row into
the ring first and attends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.config.layer_plan import LayerSpec, Side
from cedar.config.modes import IndexKeyRule
from cedar.kernels.operators import (
    Found,
    KeySearch,
    Operators,
    PagedRows,
    Pool,
    RingRows,
    Selection,
    WindowRows,
)
from cedar.model.kv import Groups
from cedar.model.spans import Spans

#: Ring modulus of a linear buffer: larger than any position.
_LINEAR = 1 << 40


@dataclass(frozen=True, kw_only=True)
class CallRules:
    """What a call may write and see, per sequence of its spans.

    Attributes:
        global_floor: tokens whose global rows are already stored; a replayed token below it leaves
            them alone.
        fresh_decoder: decoder windows start empty at the first row of each layer's spans.
        index_key_rule: which keys an index source scores (specification 7.2).
    """

    global_floor: tuple[int, ...]
    fresh_decoder: bool
    index_key_rule: IndexKeyRule


class _GroupPlan(NamedTuple):
    """How the rows of a call fall into groups of one ratio.

    `members [G, ratio]` index the concatenation of carried rows of `slots` (`ratio - 1` each) and
    new rows; `left_from` (new rows; `all_left`: every one in order) and `left_to` (slot *
    (ratio - 1) + member) say what stays open.
    """

    slots: Tensor
    closes: bool
    all_left: bool
    members: Tensor
    positions: Tensor
    sequences: Tensor
    left_from: Tensor
    left_to: Tensor


class _WindowPlan(NamedTuple):
    """Linear-buffer numbers of a call: where old and new rows go and what returns to the ring."""

    old_from: Tensor
    old_to: Tensor
    new_to: Tensor
    size: int
    keep_from: Tensor
    keep_to: Tensor
    base: Tensor
    lo: Tensor
    hi: Tensor


class _RingPlan(NamedTuple):
    """Where one row per sequence goes in the rings, and what its query sees there."""

    where: Tensor
    base: Tensor
    lo: Tensor
    hi: Tensor


class CachedRows:
    """Rows of one call.

    Args:
        state: where they are kept.
        ops: kernel backend.
        rules: what may be written and seen.
    """

    def __init__(self, state: ModelState, ops: Operators, rules: CallRules) -> None:
        self._state, self._ops, self._rules = state, ops, rules
        self._window = state.plan.sliding_window
        self._scale = state.config.head_dim**-0.5
        self.selections: dict[int, tuple[Spans, Selection]] = {}
        self.pools: dict[int, tuple[Spans, Pool]] = {}
        self._group_plans: dict[tuple[int, Spans], _GroupPlan] = {}
        self._ring_plans: dict[tuple[Side, Spans], _RingPlan] = {}
        self._visible: dict[tuple[int, Spans], Tensor] = {}
        self._window_plans: dict[tuple[Spans, Spans, tuple[int, ...]], _WindowPlan] = {}

    def complete_groups(
        self, spec: LayerSpec, spans: Spans, kv: Tensor, gate: Tensor | None
    ) -> Groups | None:
        """See `model.kv.Rows`."""
        plan, state = self._group_plan(spec.compress_ratio, spans), self._state
        if gate is None:
            if not plan.closes:
                return None
            return Groups(kv[plan.members], None, plan.positions, plan.sequences)
        pools = []
        for carried, new in (
            (state.open_kv[spec.layer_id], kv),
            (state.open_gate[spec.layer_id], gate),
        ):
            room = carried.view(-1, carried.shape[-1])
            if plan.closes:
                joined = torch.cat((carried[plan.slots].flatten(0, 1), new))
                pools.append(joined[plan.members.flatten()].unflatten(0, plan.members.shape))
            room.index_copy_(0, plan.left_to, new if plan.all_left else new[plan.left_from])
        if not pools:
            return None
        return Groups(pools[0], pools[1], plan.positions, plan.sequences)

    def store(self, spec: LayerSpec, groups: Groups, main: Tensor, index: Tensor) -> None:
        """See `model.kv.Rows`."""
        if not groups.positions.numel():
            return
        state, owner = self._state, spec.layer_id
        rows = groups.positions // spec.compress_ratio
        where = state.pool.row_numbers(owner, state.tables, groups.sequences, rows)
        self._ops.store_rows(main, state.pool.main[owner], where, state.formats.main)
        self._ops.store_rows(index, state.pool.index[owner], where, state.formats.index)
        if self._rules.index_key_rule == "as_shipped":
            for sequence in set(groups.sequences.tolist()):
                state.slots[sequence].published = owner

    def select(self, spec: LayerSpec, queries: Spans, index_q: Tensor, weights: Tensor) -> None:
        """See `model.kv.Rows`."""
        packed = self._ops.pack_rows(index_q, self._state.formats.index)
        search = self.key_search(spec, queries)
        if search is None:
            selection = self._select_as_shipped(spec, queries, packed, weights.float())
            found = Found(selection, None)
        else:
            found = self._ops.search_keys(packed, weights.float(), search)
        self.publish(spec, queries, found)

    def key_search(self, spec: LayerSpec, queries: Spans) -> KeySearch | None:
        """See `model.kv.Rows`. None where the as-shipped rule scores keys of another owner."""
        assert spec.kv_owner is not None
        state, plan = self._state, self._state.plan
        if self._rules.index_key_rule == "as_shipped" and any(
            state.slots[slot].published != spec.kv_owner for slot in queries.sequences
        ):
            return None
        keys = state.pool.paged_index(spec.kv_owner, state.tables)
        visible = self._visible_to(spec.compress_ratio, queries)
        search = KeySearch(keys, queries.row_sequences, visible, plan.index_topk)
        if spec.candidate == "source":
            return search._replace(
                num_blocks=plan.candidate_topk_blocks, block_size=plan.candidate_block_size
            )
        if spec.candidate == "consumer":
            return search._replace(pool=self._pool_of(spec, queries))
        return search

    def publish(self, spec: LayerSpec, queries: Spans, found: Found) -> None:
        """See `model.kv.Rows`."""
        self.selections[spec.layer_id] = (queries, found.selection)
        if found.pool is not None:
            assert spec.kv_owner is not None
            self.pools[spec.kv_owner] = (queries, found.pool)

    def in_ring(self, spec: LayerSpec, spans: Spans, queries: Spans) -> RingRows | None:
        """See `model.kv.Rows`. Not None in calls with one token per sequence."""
        if not spans.one_each:
            return None
        plan = self._ring_plan(spec, spans)
        ring, fmt = self._state.ring_rows[spec.layer_id], self._state.formats.window
        near = WindowRows(ring, plan.base, plan.lo, plan.hi, self._window, fmt)
        far, selection = self._selected(spec, queries)
        return RingRows(near, plan.where, far, selection, queries.row_sequences, self._scale)

    def attend(
        self, spec: LayerSpec, spans: Spans, window: Tensor, queries: Spans, q: Tensor,
        sink: Tensor, q_selected: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """See `model.kv.Rows`."""
        rows = self.in_ring(spec, spans, queries)
        if rows is not None:
            near = rows.window
            self._ops.store_rows(window, near.rows, rows.where, near.fmt)
            return self._ops.sparse_attention(
                q, near, rows.selected, rows.selection, rows.sequences, sink, scale=self._scale,
                q_selected=q_selected,
            )  # fmt: skip
        ring, fmt = self._state.ring_rows[spec.layer_id], self._state.formats.window
        plan = self._window_plan(spec, spans, queries)
        buffer = torch.empty(plan.size, ring.shape[1], dtype=torch.uint8)
        _copy_rows(ring, plan.old_from, buffer, plan.old_to)
        self._ops.store_rows(window, buffer, plan.new_to, fmt)
        near = WindowRows(buffer, plan.base, plan.lo, plan.hi, _LINEAR, fmt)
        far, selection = self._selected(spec, queries)
        out = self._ops.sparse_attention(
            q, near, far, selection, queries.row_sequences, sink, scale=self._scale,
            q_selected=q_selected,
        )  # fmt: skip
        _copy_rows(buffer, plan.keep_from, ring, plan.keep_to)
        return out

    def _visible_to(self, ratio: int, queries: Spans) -> Tensor:
        """Rows that exist for each query, int32: floor((position + 1) / ratio)."""
        if (ratio, queries) not in self._visible:
            count = (queries.positions + 1) // ratio
            self._visible[ratio, queries] = count.to(torch.int32)
        return self._visible[ratio, queries]

    def _selected(
        self, spec: LayerSpec, queries: Spans
    ) -> tuple[PagedRows | None, Selection | None]:
        """Compressed rows of a layer and what it selected of them; not yet: a source that will."""
        if spec.kv_owner is None or spec.topk_owner is None:
            return None, None
        paged = self._state.pool.paged_main(spec.kv_owner, self._state.tables)
        if spec.topk_owner == spec.layer_id and spec.layer_id not in self.selections:
            return paged, None
        spans, selection = self.selections[spec.topk_owner]
        keep = spans.rows_of(queries)
        if keep is not None:
            selection = Selection(selection.positions[keep])
        return paged, selection

    def _pool_of(self, spec: LayerSpec, queries: Spans) -> Pool:
        assert spec.kv_owner is not None
        spans, pool = self.pools[spec.kv_owner]
        keep = spans.rows_of(queries)
        return pool if keep is None else Pool(pool.blocks[keep], pool.block_size)

    def _select_as_shipped(
        self, spec: LayerSpec, queries: Spans, packed: Tensor, weights: Tensor
    ) -> Selection:
        """Score the keys that were published last, whoever owns them (specification 7.2).

        The published release program does so in decode steps in which a ratio-2 owner completes no
        group. Candidate pools are left out: over stale keys they mean nothing (the release's
        candidate source has ratio 1, so its keys are never stale).
        """
        state = self._state
        topk, visible = state.plan.index_topk, self._visible_to(spec.compress_ratio, queries)
        out = torch.full((queries.num_rows, topk), -1, dtype=torch.int32)
        for offset, count, slot in zip(
            queries.offsets, queries.counts, queries.sequences, strict=True
        ):
            owner = state.slots[slot].published
            if owner is None:
                continue
            rows = slice(offset, offset + count)
            keys = state.pool.paged_index(owner, state.tables)
            exist = visible[rows]
            if owner != spec.kv_owner:
                exist = exist.clamp(
                    max=state.slots[slot].length // state.plan[owner].compress_ratio
                )
            picked = self._ops.index_topk(
                packed[rows], weights[rows], keys, queries.row_sequences[rows], exist, topk=topk
            )
            out[rows] = picked.positions
        return Selection(out)

    def _ring_plan(self, spec: LayerSpec, spans: Spans) -> _RingPlan:
        """Of one side of the model: its layers share floors."""
        plan = self._ring_plans.get((spec.side, spans))
        if plan is None:
            plan = _plan_ring(spans, self._floors(spec, spans), self._window)
            self._ring_plans[spec.side, spans] = plan
        return plan

    def _floors(self, spec: LayerSpec, spans: Spans) -> tuple[int, ...]:
        """First visible position of each sequence in this layer."""
        slots = [self._state.slots[s] for s in spans.sequences]
        if spec.side == "encoder":
            return tuple(slot.encoder_floor for slot in slots)
        if self._rules.fresh_decoder:
            return spans.starts
        return tuple(slot.decoder_floor for slot in slots)

    def _window_plan(self, spec: LayerSpec, spans: Spans, queries: Spans) -> _WindowPlan:
        floors = self._floors(spec, spans)
        key = (spans, queries, floors)
        if key not in self._window_plans:
            self._window_plans[key] = _plan_window(spans, queries, floors, self._window)
        return self._window_plans[key]

    def _group_plan(self, ratio: int, spans: Spans) -> _GroupPlan:
        key = (ratio, spans)
        if key not in self._group_plans:
            self._group_plans[key] = _plan_groups(ratio, spans, self._rules.global_floor)
        return self._group_plans[key]


def _copy_rows(source: Tensor, from_rows: Tensor, target: Tensor, to_rows: Tensor) -> None:
    """Copy packed rows whole, in numpy: torch goes byte by byte, three times as long in a short call."""
    row = f"V{source.shape[1]}"
    target.numpy().view(row)[to_rows.numpy()] = source.numpy().view(row)[from_rows.numpy()]


def _plan_groups(ratio: int, spans: Spans, floors: tuple[int, ...]) -> _GroupPlan:
    """Groups that the rows of a call complete, and the rows they leave open."""
    carried = len(spans.sequences) * (ratio - 1)
    members, positions, sequences, left_from, left_to = [], [], [], [], []
    for i, (slot, start, end, floor) in enumerate(
        zip(spans.sequences, spans.starts, spans.ends, floors, strict=True)
    ):
        stored = floor // ratio
        first = max(start // ratio, stored)
        # Where the row of token t sits in [carried rows | new rows].
        new = carried + spans.offsets[i] - start
        old = i * (ratio - 1)
        last = max(end // ratio, first)
        if first < last:  # most sequences of a decode step complete nothing
            j = torch.arange(first, last)
            tokens = j.unsqueeze(1) * ratio + torch.arange(ratio)
            members.append(torch.where(tokens >= start, tokens + new, tokens % ratio + old))
            positions.append(j * ratio)
            sequences.append(torch.full_like(j, slot))
        for t in range(max(last * ratio, first * ratio), end):
            if t >= start:
                left_from.append(t + new - carried)
                left_to.append(slot * (ratio - 1) + t % ratio)
    return _GroupPlan(
        torch.tensor(spans.sequences),
        bool(members),
        left_from == list(range(spans.num_rows)),
        torch.cat(members) if members else torch.empty(0, ratio, dtype=torch.int64),
        torch.cat(positions) if members else torch.empty(0, dtype=torch.int64),
        torch.cat(sequences) if members else torch.empty(0, dtype=torch.int64),
        torch.tensor(left_from, dtype=torch.int64),
        torch.tensor(left_to, dtype=torch.int64),
    )


def _plan_ring(spans: Spans, floors: tuple[int, ...], window: int) -> _RingPlan:
    base = spans.row_sequences.long() * window
    hi = spans.positions
    lo = torch.maximum(hi - window + 1, torch.tensor(floors))
    return _RingPlan(base + hi % window, base, lo.to(torch.int32), hi.to(torch.int32))


def _plan_window(spans: Spans, queries: Spans, floors: tuple[int, ...], window: int) -> _WindowPlan:
    """Numbers of the linear buffer of a call; see the file's first lines."""
    reach = window - 1
    old_from, old_to, new_to, keep_from, keep_to, base, lo = [], [], [], [], [], [], []
    size = 0
    for slot, start, end, floor, count in zip(
        spans.sequences, spans.starts, spans.ends, floors, queries.counts, strict=True
    ):
        shift = size + reach - start  # buffer row of token t is t + shift
        old = torch.arange(max(start - reach, floor), start)
        old_from.append(slot * window + old % window)
        old_to.append(old + shift)
        new = torch.arange(start, end)
        new_to.append(new + shift)
        kept = new[-window:]
        keep_from.append(kept + shift)
        keep_to.append(slot * window + kept % window)
        base.append(torch.full((count,), shift))
        lo.append((torch.arange(end - count, end) - reach).clamp(min=floor))
        size += reach + end - start
    return _WindowPlan(
        torch.cat(old_from),
        torch.cat(old_to),
        torch.cat(new_to),
        size,
        torch.cat(keep_from),
        torch.cat(keep_to),
        torch.cat(base),
        torch.cat(lo).to(torch.int32),
        queries.positions.to(torch.int32),
    )
