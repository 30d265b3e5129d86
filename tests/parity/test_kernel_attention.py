"""Recorded sparse attention and visible window entries."""

from __future__ import annotations

import re

import pytest
import torch
from closeness import assert_bf16, assert_f32
from row_probe import WindowProbe
from torch import Tensor

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.formats.codec import decode_rows
from cedar.formats.rows import RowFormat
from cedar.kernels.operators import Operators, PagedRows, Selection, WindowRows
from cedar.kernels.reference_attention import attend
from cedar.model.spans import Spans

Recorded = dict[str, Tensor]
CASES = ["small", "blocks", "peaked"]


def attention_case(recorded: Recorded, case: str) -> dict[str, Tensor]:
    """Queries of all sequences `[N, H, d]`, their gathered entries and the mask of used ones."""
    q, kv, idx = (recorded[f"sparse_attn.{case}.{name}"] for name in ("q", "kv", "idx"))
    batch, queries = idx.shape[:2]
    rows = torch.arange(batch).view(-1, 1, 1).expand_as(idx)
    gathered = kv[rows, idx.long().clamp(min=0)]
    return {
        "q": q.flatten(0, 1),
        "values": gathered.flatten(0, 1).float(),
        "mask": (idx >= 0).flatten(0, 1),
        "idx": idx.flatten(0, 1),
        "sequences": torch.arange(batch, dtype=torch.int32).repeat_interleave(queries),
        "sink": recorded[f"sparse_attn.{case}.sink"],
        "scale": recorded[f"sparse_attn.{case}.scale"],
        "out": recorded[f"sparse_attn.{case}.out"].flatten(0, 1),
        "out_f32": recorded[f"sparse_attn.{case}.out_f32"].flatten(0, 1),
    }


@pytest.mark.parametrize("case", CASES)
def test_reference_attention_matches_the_recorded_one(kernel_vectors: Recorded, case: str) -> None:
    c = attention_case(kernel_vectors, case)
    scale = float(c["scale"])
    rounded, _ = attend(c["q"], c["values"], c["mask"], c["sink"], scale=scale)
    assert_bf16(rounded, c["out"], ulps=2)
    plain, _ = attend(c["q"].float(), c["values"], c["mask"], c["sink"], scale=scale)
    assert_f32(plain, c["out_f32"])


@pytest.mark.parametrize("case", CASES)
def test_attention_over_packed_rows_matches_softmax_over_their_values(
    ops: Operators, kernel_vectors: Recorded, case: str
) -> None:
    """The recorded queries, sinks and index lists over packed rows, in every layout of the entries:
    all selected, all in the window, and both."""
    c = attention_case(kernel_vectors, case)
    kv = kernel_vectors[f"sparse_attn.{case}.kv"]
    width, count = kv.shape[-1], kv.shape[1]
    main, near = RowFormat("main", width), RowFormat("window", width)
    paged = PagedRows(
        ops.pack_rows(kv.flatten(0, 1), main),
        torch.arange(kv.shape[0], dtype=torch.int32).unsqueeze(1),
        count,
        main,
    )
    ring = ops.pack_rows(kv.flatten(0, 1), near)
    chosen = c["idx"].sort(dim=-1, descending=False).values
    chosen = torch.stack([torch.cat((row[row >= 0], row[row < 0])) for row in chosen])
    for width_of_window in (0, 5):
        lo = torch.full((len(c["q"]),), 3, dtype=torch.int32)
        window = WindowRows(
            ring, c["sequences"].long() * count, lo, lo + width_of_window - 1, count, near
        )
        for selection in (None, Selection(chosen)):
            if width_of_window == 0 and selection is None:
                continue
            for dtype, check in ((torch.float32, assert_f32), (torch.bfloat16, assert_bf16)):
                expected = dense_attention(c, dtype, window, paged, selection)
                out, far = ops.sparse_attention(
                    c["q"].to(dtype), window, None if selection is None else paged, selection,
                    c["sequences"], c["sink"], scale=float(c["scale"]),
                )  # fmt: skip
                assert far is None
                check(out, expected)


def dense_attention(
    c: dict[str, Tensor], dtype: torch.dtype, window: WindowRows, paged: PagedRows,
    selection: Selection | None,
) -> Tensor:  # fmt: skip
    """Softmax over the decoded rows, all of them gathered one query at a time."""
    out = []
    for n, q in enumerate(c["q"].to(dtype)):
        span = torch.arange(int(window.lo[n]), int(window.hi[n]) + 1)
        entries = decode_rows(window.rows[window.base[n] + span], window.fmt)
        if selection is not None:
            kept = selection.positions[n][selection.positions[n] >= 0].long()
            rows = int(c["sequences"][n]) * paged.rows_per_block + kept
            entries = torch.cat((entries, decode_rows(paged.rows[rows], paged.fmt)))
        mask = torch.ones(1, len(entries), dtype=torch.bool)
        near, _ = attend(q[None], entries[None], mask, c["sink"], scale=float(c["scale"]))
        out.append(near[0])
    return torch.stack(out)


def test_a_query_without_any_row_gives_zeros(ops: Operators, kernel_vectors: Recorded) -> None:
    c = attention_case(kernel_vectors, "small")
    empty = ~c["mask"].any(-1)
    assert empty.any()
    assert (c["out"][empty] == 0).all()
    width = c["q"].shape[-1]
    fmt = RowFormat("window", width)
    count = len(c["q"])
    lo = torch.zeros(count, dtype=torch.int32)
    window = WindowRows(
        torch.zeros(4, fmt.row_bytes, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64),
        lo, lo - 1, 4, fmt,
    )  # fmt: skip
    out, _ = ops.sparse_attention(
        c["q"], window, None, None, torch.zeros(count, dtype=torch.int32), c["sink"], scale=0.1
    )
    assert (out == 0).all()


def window_config(window: int) -> ModelConfig:
    from dataclasses import replace

    return replace(preset("tiny"), sliding_window=window)


def window_cases(recorded: Recorded, phase: str) -> list[tuple[int, int, Tensor]]:
    cases = []
    for name, table in recorded.items():
        found = re.fullmatch(rf"window_idx\.{phase}\.w(\d+)_[Lp](\d+)", name)
        if found:
            cases.append((int(found[1]), int(found[2]), table))
    assert len(cases) > 15
    return cases


def test_visible_window_entries_of_a_prefill_are_the_recorded_ones(
    kernel_vectors: Recorded,
) -> None:
    for window, length, table in window_cases(kernel_vectors, "prefill"):
        probe = WindowProbe(window_config(window), batch=1)
        visible = probe.attend(Spans((0,), (0,), (length,)))
        assert visible == [{p for p in row.tolist() if p >= 0} for row in table]


def test_visible_ring_slots_of_a_decode_step_are_the_recorded_ones(
    kernel_vectors: Recorded,
) -> None:
    for window, position, table in window_cases(kernel_vectors, "decode"):
        probe = WindowProbe(window_config(window), batch=1)
        probe.attend(Spans((0,), (0,), (position,)))
        visible = probe.attend(Spans((0,), (position,), (1,)))
        slots = {p for p in table[0].tolist() if p >= 0}
        assert {p % window for p in visible[0]} == slots
        assert probe.last_window.modulus == window
