"""Index selection: a brute-force oracle, ties, thresholds, candidate pools and bounded scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_oracle import FMT, Keys, best, best_blocks, used
from sequences import prefill, tokens
from torch import Tensor

from cedar.config.presets import preset
from cedar.engine.loaded_model import LoadedModel
from cedar.kernels import reference_index
from cedar.kernels.operators import Operators, PagedRows, Pool
from cedar.kernels.reference import ReferenceOperators

Exact = Callable[..., LoadedModel]

CASES = [([13], 4), ([0, 10], 4), ([0, 0], 4), ([21, 3, 8], 5), ([1], 4), ([40], 16), ([5, 4], 4)]


@pytest.mark.parametrize("levels", [2, 4])
@pytest.mark.parametrize(("lengths", "topk"), CASES)
def test_selection_and_pool_are_those_of_exact_arithmetic(
    ops: Operators, lengths: list[int], topk: int, levels: int
) -> None:
    """Every query of every sequence against fractions, ties included; sequences without any key
    give an empty selection."""
    keys = Keys(lengths, levels=levels, seed=sum(lengths) + levels)
    sequences, visible = [], []
    for s, n in enumerate(lengths):
        for count in {n, n // 2, max(0, n - 1)}:
            sequences.append(s)
            visible.append(count)
    packed, weights = keys.queries(len(sequences))
    where, count = (
        torch.tensor(sequences, dtype=torch.int32),
        torch.tensor(visible, dtype=torch.int32),
    )
    plain = ops.index_topk(packed, weights, keys.paged(), where, count, topk=topk)
    both, pool = ops.index_pool(
        packed, weights, keys.paged(), where, count, topk=topk, num_blocks=2, block_size=3
    )
    inside = ops.index_topk(packed, weights, keys.paged(), where, count, topk=topk, pool=pool)
    assert plain.positions.shape == (len(sequences), topk)
    assert plain.positions.dtype == torch.int32
    assert pool.block_size == 3
    chosen, again, within = used(plain.positions), used(both.positions), used(inside.positions)
    blocks = used(pool.blocks)
    for n, (s, seen) in enumerate(zip(sequences, visible, strict=True)):
        scores = keys.scores(packed[n], weights[n], s, seen)
        assert chosen[n] == again[n] == best(scores, topk)
        assert blocks[n] == best_blocks(scores, 2, 3)
        allowed = {3 * b + i for b in blocks[n] for i in range(3)}
        assert within[n] == best(scores, topk, allowed)


def test_equal_scores_give_the_lowest_positions_every_time(ops: Operators) -> None:
    """Six equal scores, room for four, in a sequence whose rows do not start at row 0 (regression
    class: other order in other runs, indices relative to the wrong row)."""
    keys = Keys([3, 12], seed=1)
    keys.rows[:] = keys.rows[0]
    for j in range(12):
        if j not in (2, 3, 5, 7, 8, 11):
            row = int(keys.tables[1, j // 4]) * 4 + j % 4
            keys.rows[row] = 0
    values = torch.ones(1, 2, 32)
    loud = ReferenceOperators().pack_rows(values[0, :1], FMT)
    for j in (2, 3, 5, 7, 8, 11):
        keys.rows[int(keys.tables[1, j // 4]) * 4 + j % 4] = loud[0]
    packed = ReferenceOperators().pack_rows(values, FMT)
    first = None
    for _ in range(20):
        kept = ops.index_topk(
            packed, torch.ones(1, 2), keys.paged(), torch.tensor([1], dtype=torch.int32),
            torch.tensor([12], dtype=torch.int32), topk=4,
        )  # fmt: skip
        assert kept.positions.tolist() == [[2, 3, 5, 7]]
        first = kept.positions if first is None else first
        assert torch.equal(kept.positions, first)


def test_negative_head_scores_count_as_zero(ops: Operators) -> None:
    """Two heads: without the clamp at zero the second key would win."""
    keys = Keys([2], seed=2)
    values = torch.zeros(2, 32)
    values[0, 0], values[0, 1] = 2.0, -6.0  # head scores 2 and -6 -> 2 + 0
    values[1, 0], values[1, 1] = 1.0, 0.0  # head scores 1 and 0 -> 1 + 0
    rows = ReferenceOperators().pack_rows(values, FMT)
    for j in range(2):
        keys.rows[int(keys.tables[0, 0]) * 4 + j] = rows[j]
    query = torch.zeros(1, 2, 32)
    query[0, 0, 0], query[0, 1, 1] = 1.0, 1.0
    kept = ops.index_topk(
        ReferenceOperators().pack_rows(query, FMT), torch.ones(1, 2), keys.paged(),
        torch.zeros(1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32), topk=1,
    )  # fmt: skip
    assert kept.positions.tolist() == [[0]]


def test_keys_of_other_queries_and_padding_are_not_read(ops: Operators) -> None:
    """Everything beyond the visible keys is poison: scales that decode to NaN (regression class:
    garbage in padded metadata reaches a score)."""
    keys = Keys([9, 6], seed=3)
    packed, weights = keys.queries(2)
    where = torch.tensor([0, 1], dtype=torch.int32)
    visible = torch.tensor([7, 6], dtype=torch.int32)

    def select() -> list[list[int]]:
        kept, pool = ops.index_pool(
            packed, weights, keys.paged(), where, visible, topk=4, num_blocks=2, block_size=2
        )
        return used(kept.positions) + used(pool.blocks)

    clean = select()
    seen = {int(keys.tables[s, j // 4]) * 4 + j % 4 for s, n in ((0, 7), (1, 6)) for j in range(n)}
    hidden = [row for row in range(len(keys.rows)) if row not in seen]
    assert hidden
    keys.rows[hidden] = 0xFF
    assert select() == clean


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_the_selection_is_everything_up_to_its_size_and_drops_the_lowest_above(
    exact: Exact, watch_rows: Callable, rows: int
) -> None:  # type: ignore[type-arg]
    """index_topk 4 with 3, 4 and 5 rows (regression class: early rows lost at the threshold)."""
    model = exact("tiny")
    ids = tokens(model, rows, seed=5)
    with watch_rows(model) as calls:
        logits, _ = prefill(model, ids)
    last = calls[0].selections[4][1].positions[-1].tolist()
    wide = exact(replace(preset("tiny"), index_topk=16, candidate_topk_blocks=16))
    everything, _ = prefill(wide, ids)
    if rows <= 4:
        assert last == [*range(rows), *[-1] * (4 - rows)]
        assert torch.equal(logits, everything)
    else:
        assert len(set(last)) == 4
        assert not torch.equal(logits, everything)


def test_the_dropped_row_is_the_lowest_scoring_one(ops: Operators) -> None:
    keys = Keys([5], levels=4, seed=6)
    packed, weights = keys.queries(1)
    scores = keys.scores(packed[0], weights[0], 0, 5)
    kept = ops.index_topk(
        packed, weights, keys.paged(), torch.zeros(1, dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32), topk=4,
    )  # fmt: skip
    (dropped,) = set(range(5)) - set(used(kept.positions)[0])
    assert scores[dropped] == min(scores)


def test_a_pool_as_large_as_the_context_changes_nothing(exact: Exact) -> None:
    """Candidates are invisible until there are more positions than the pool holds, and then they
    change only layers after their source."""
    narrow = exact("tiny")
    wide = exact(replace(preset("tiny"), candidate_topk_blocks=64))
    none = exact(replace(preset("tiny"), candidate_source_layer_id=-1))
    ids = tokens(narrow, 30, seed=7)
    for length, same in ((6, True), (30, False)):
        logits = [prefill(model, ids[:, :length]) for model in (narrow, wide, none)]
        assert torch.equal(logits[1][0], logits[2][0])
        assert torch.equal(logits[0][0], logits[1][0]) == same
    left, right = logits[0][1].rings, logits[1][1].rings
    changed = [layer for layer in range(8) if not torch.equal(left[layer], right[layer])]
    assert changed == [7], "layer 6 consumes the pool, so layer 7 is the first to see it"


def test_the_source_itself_selects_outside_its_pool(ops: Operators) -> None:
    """Only later sources are restricted: with one block of one position the source still selects
    four rows."""
    keys = Keys([20], levels=4, seed=8)
    packed, weights = keys.queries(1)
    kept, pool = ops.index_pool(
        packed, weights, keys.paged(), torch.zeros(1, dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32), topk=4, num_blocks=1, block_size=1,
    )  # fmt: skip
    assert used(pool.blocks) == [[19]], "the newest position is always in the pool"
    assert len(used(kept.positions)[0]) == 4


def test_blocks_outside_the_context_are_ignored(ops: Operators) -> None:
    keys = Keys([6], seed=9)
    packed, weights = keys.queries(1)
    pool = Pool(torch.tensor([[1, 500, -1]], dtype=torch.int32), 2)
    kept = ops.index_topk(
        packed, weights, keys.paged(), torch.zeros(1, dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32), topk=4, pool=pool,
    )  # fmt: skip
    assert used(kept.positions) == [[2, 3]]


@settings(max_examples=25)
@given(
    length=st.integers(0, 30), topk=st.integers(1, 8), seed=st.integers(0, 100),
    levels=st.integers(2, 5),
)  # fmt: skip
def test_any_selection_is_the_brute_force_one(
    ops: Operators, length: int, topk: int, seed: int, levels: int
) -> None:
    keys = Keys([length], levels=levels, seed=seed)
    packed, weights = keys.queries(1)
    kept = ops.index_topk(
        packed, weights, keys.paged(), torch.zeros(1, dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32), topk=topk,
    )  # fmt: skip
    assert used(kept.positions) == [best(keys.scores(packed[0], weights[0], 0, length), topk)]


@pytest.mark.parametrize("length", [1024, 4096])
def test_reference_scratch_is_bounded_whatever_the_context(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Scores are formed in tiles of queries: the largest one stays under the budget, and the
    selection is the untiled one (regression class: a score matrix of all queries x all keys)."""
    heads, budget = 2, 1 << 15
    generator = torch.Generator().manual_seed(0)
    keys = ReferenceOperators().pack_rows(torch.randn(length, 32, generator=generator), FMT)
    paged = PagedRows(keys, torch.zeros(1, 1, dtype=torch.int32), length, FMT)
    queries = ReferenceOperators().pack_rows(torch.randn(64, heads, 32, generator=generator), FMT)
    weights = torch.rand(64, heads, generator=generator)
    visible = torch.linspace(1, length, 64).to(torch.int32)
    where = torch.zeros(64, dtype=torch.int32)
    whole = ReferenceOperators().index_topk(queries, weights, paged, where, visible, topk=16)

    sizes: list[int] = []
    original = reference_index.index_scores

    def spy(q: Tensor, w: Tensor, k: Tensor) -> Tensor:
        scores = original(q, w, k)
        sizes.append(scores.numel() * heads)
        return scores

    monkeypatch.setattr(reference_index, "index_scores", spy)
    monkeypatch.setattr(reference_index, "_TILE_VALUES", budget)
    tiled = ReferenceOperators().index_topk(queries, weights, paged, where, visible, topk=16)
    assert torch.equal(tiled.positions, whole.positions)
    assert max(sizes) <= budget
    assert len(sizes) > 1
