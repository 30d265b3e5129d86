"""Rows that do not exist are never read: poison in them changes nothing, and masks never turn to
NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sequences import prefill, steps, tokens
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.engine.loaded_model import LoadedModel
from cedar.formats.codec import encode_rows
from cedar.formats.rows import RowFormat
from cedar.kernels.operators import Operators, PagedRows, Selection, WindowRows

Loader = Callable[..., LoadedModel]

#: Codes and scales of all ones: NaN in every row format that can hold one.
POISON = 0xFF


def poisoned(model: LoadedModel, max_tokens: int, batch: int = 1) -> ModelState:
    """An empty state in which every row that was never written is poison."""
    state = model.new_state(max_tokens, batch=batch)
    for rows in (*state.pool.main.values(), *state.pool.index.values(), state.rings):
        rows.fill_(POISON)
    for rows in (*state.open_kv.values(), *state.open_gate.values()):
        rows.fill_(float("nan"))
    return state


def run(model: LoadedModel, state: ModelState, ids: list[Tensor], mode: str) -> Tensor:
    logits = [model.prefill([row[:-6] for row in ids], state, decoder_prefill=mode)]
    logits += [model.step(torch.stack([row[j - 6] for row in ids]), state) for j in range(6)]
    return torch.stack(logits, 1)


@pytest.mark.parametrize("mode", ["full", "report", "cut", "exact"])
@pytest.mark.parametrize(("model", "dtype"), [("m1", "float32"), ("m2", "bfloat16")])
def test_poison_in_unwritten_rows_changes_no_logit(
    load_recorded: Loader, recorded: Callable[[str, str], dict[str, Tensor]], model: str, dtype: str,
    mode: str,
) -> None:  # fmt: skip
    """Masked slots clamp to row 0 in some kernels, and 0 x NaN is NaN: prompts shorter and longer
    than the window, open groups, unused top-k slots and decode (regression class: NaN in unused
    rows)."""
    loaded = load_recorded(model, dtype)
    ids = recorded(model, dtype)["tokens"].long()[0]
    for lengths in ((9,), (43, 8)):
        prompts = [ids[:n] for n in lengths]
        clean = run(loaded, loaded.new_state(64, batch=len(lengths)), prompts, mode)
        dirty = run(loaded, poisoned(loaded, 64, batch=len(lengths)), prompts, mode)
        assert torch.isfinite(dirty).all()
        assert torch.equal(dirty, clean)


@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
def test_poison_changes_nothing_after_a_prefix_hit(exact: Loader, name: str) -> None:
    """The rings of a hit hold nothing below the replay: clipped, not read."""
    model = exact(name)
    ids = tokens(model, 44)
    _, stored = prefill(model, ids[:, :40], decoder_prefill="report")
    results = []
    for poison in (False, True):
        hit = stored.prefix(40)
        if poison:
            hit.rings.fill_(POISON)
            rows = {o: 40 // model.plan[o].compress_ratio for o in hit.pool.main}
            for owner, count in rows.items():
                hit.pool.main[owner][count:] = POISON
                hit.pool.index[owner][count:] = POISON
        logits = model.prefill(ids[:, 40:], hit, prefix_ids=ids[:, :40], decoder_prefill="report")
        results.append(torch.cat((logits, steps(model, ids[:, :3], hit)[0])))
    assert torch.isfinite(results[1]).all()
    assert torch.equal(*results)


def test_old_contents_of_a_reused_slot_are_unreachable(exact: Loader) -> None:
    """A slot that held a longer sequence and starts again: ring, groups and rows are stale."""
    model = exact("tiny")
    ids = tokens(model, 60)
    state = model.new_state(64)
    model.prefill(ids[:, :37], state)
    state.reset(0)
    expected, fresh = prefill(model, ids[:, 37:48])
    assert torch.equal(model.prefill(ids[:, 37:48], state), expected)
    assert torch.equal(steps(model, ids[:, 48:52], state), steps(model, ids[:, 48:52], fresh))


def entries(ops: Operators, count: int) -> tuple[WindowRows, PagedRows, Tensor, Tensor]:
    """Four queries whose rows lie between poisoned ones."""
    generator = torch.Generator().manual_seed(0)
    main, near = RowFormat("main", 32), RowFormat("window", 32)
    rows = torch.full((3 * count, near.row_bytes), POISON, dtype=torch.uint8)
    rows[1::3] = encode_rows(torch.randn(count, 32, generator=generator), near)
    far = torch.full((3 * count, main.row_bytes), POISON, dtype=torch.uint8)
    far[1::3] = encode_rows(torch.randn(count, 32, generator=generator), main)
    # Each query sees one window row; rows before and after it are poison.
    position = torch.tensor([1, 4, 7, 10], dtype=torch.int32)
    window = WindowRows(rows, torch.zeros(4, dtype=torch.int64), position, position, 1 << 40, near)
    paged = PagedRows(far, torch.zeros(1, 1, dtype=torch.int32), 3 * count, main)
    q = torch.randn(4, 2, 32, generator=generator)
    return window, paged, q, torch.tensor([0.3, -0.2])


def test_attention_reads_no_row_outside_window_and_selection(ops: Operators) -> None:
    """Unused slots, an empty selection and an empty window stand next to used ones; row 0 is
    poison, so a slot clamped to it shows."""
    window, paged, q, sink = entries(ops, 8)
    positions = torch.full((4, 5), -1, dtype=torch.int32)
    positions[0, :2] = torch.tensor([4, 7])
    positions[2, :1] = 22
    empty = window._replace(hi=window.hi - torch.tensor([0, 0, 0, 1], dtype=torch.int32))
    out, _ = ops.sparse_attention(
        q, empty, paged, Selection(positions), torch.zeros(4, dtype=torch.int32), sink, scale=0.2
    )
    assert torch.isfinite(out).all()
    assert (out[3] == 0).all(), "no row at all gives zeros"
    assert (out[:3] != 0).any(-1).all()
    alone, _ = ops.sparse_attention(
        q[1:2], WindowRows(*(part[1:2] if isinstance(part, Tensor) and part.dim() == 1 else part
                             for part in window)),
        None, None, torch.zeros(1, dtype=torch.int32), sink, scale=0.2,
    )  # fmt: skip
    assert torch.equal(out[1:2], alone), "a query without selected rows attends to its window only"


def test_padded_queries_do_not_disturb_real_ones(ops: Operators) -> None:
    """Three real rows and five padded ones, whose window is empty and whose selection is unused."""
    window, paged, q, sink = entries(ops, 8)
    positions = torch.full((8, 5), -1, dtype=torch.int32)
    positions[:3, 0] = torch.tensor([1, 4, 7])
    lo = torch.cat((window.lo[:3], torch.full((5,), 5, dtype=torch.int32)))
    hi = torch.cat((window.hi[:3], torch.full((5,), 4, dtype=torch.int32)))
    padded = WindowRows(window.rows, torch.zeros(8, dtype=torch.int64), lo, hi, 1 << 40, window.fmt)
    queries = torch.cat((q[:3], torch.full((5, 2, 32), 1e30)))
    out, _ = ops.sparse_attention(
        queries, padded, paged, Selection(positions), torch.zeros(8, dtype=torch.int32), sink,
        scale=0.2,
    )  # fmt: skip
    real = WindowRows(window.rows, window.base[:3], lo[:3], hi[:3], 1 << 40, window.fmt)
    expected, _ = ops.sparse_attention(
        q[:3], real, paged, Selection(positions[:3]), torch.zeros(3, dtype=torch.int32), sink,
        scale=0.2,
    )  # fmt: skip
    assert torch.equal(out[:3], expected)
    assert (out[3:] == 0).all()


def test_reuse_layers_attend_with_the_list_of_their_source(
    exact: Loader, watch_rows: Callable
) -> None:  # type: ignore[type-arg]
    """Lists live for one call: nothing is left over to read before a source has selected, and each
    source answers for itself (regression class: an uninitialised index list)."""
    model = exact("tiny")
    ids = tokens(model, 30)
    with watch_rows(model) as calls:
        _, state = prefill(model, ids[:, :20])
        steps(model, ids[:, 20:24], state)
    assert len(calls) == 5
    for rows in calls:
        assert set(rows.selections) == set(model.config.index_source_layer_ids)
    lists = [rows.selections[source][1].positions for rows in calls for source in (1, 3, 4, 6)]
    assert len({t.data_ptr() for t in lists}) == len(lists)


def test_a_layer_without_a_selection_is_an_error_not_a_guess(
    exact: Loader, watch_rows: Callable
) -> None:  # type: ignore[type-arg]
    """A reuse layer asked to attend before its source has selected must not fall back to anything."""
    model = exact("tiny")
    with watch_rows(model) as calls:
        _, state = prefill(model, tokens(model, 9))
    fresh = type(calls[0])(state, model.ops, calls[0]._rules)
    spec = model.plan[2]
    assert spec.role == "reuse"
    with pytest.raises(KeyError):
        fresh._selected(spec, calls[0].selections[1][0])
