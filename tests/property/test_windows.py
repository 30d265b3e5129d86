"""Window rows: every query reads exactly the rows of its window, however tokens were fed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_probe import WindowProbe

from cedar.config.presets import preset
from cedar.model.spans import Spans


def probe(window: int, batch: int) -> WindowProbe:
    return WindowProbe(replace(preset("tiny"), sliding_window=window), batch=batch)


def expected(position: int, window: int, floor: int = 0) -> set[int]:
    return set(range(max(floor, position - window + 1), position + 1))


@given(
    window=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 23), min_size=1, max_size=8),
)
def test_queries_of_any_chunks_see_their_window_and_read_the_right_rows(
    window: int, chunks: list[int]
) -> None:
    """The probe reads each row back: positions and sequence are spelled in its values."""
    rows, start = probe(window, 1), 0
    for count in chunks:
        seen = rows.attend(Spans((0,), (start,), (count,)))
        assert seen == [expected(p, window) for p in range(start, start + count)]
        start += count


@given(
    window=st.integers(1, 6),
    feeds=st.lists(
        st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=6
    ),
)
def test_sequences_of_a_batch_never_see_each_other(window: int, feeds: list[list[int]]) -> None:
    """Any subset of three sequences goes on by any number of tokens in each call."""
    rows, lengths = probe(window, 3), [0, 0, 0]
    for counts in feeds:
        active = [slot for slot in range(3) if counts[slot]]
        spans = Spans(
            tuple(active),
            tuple(lengths[slot] for slot in active),
            tuple(counts[slot] for slot in active),
        )
        wanted = [
            expected(p, window)
            for slot in active
            for p in range(lengths[slot], lengths[slot] + counts[slot])
        ]
        assert rows.attend(spans) == wanted
        for slot in active:
            lengths[slot] += counts[slot]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_only_the_queries_asked_for_are_answered(count: int) -> None:
    """All rows of a call are stored, but only its last rows attend."""
    rows = probe(4, 2)
    spans = Spans((0, 1), (0, 0), (9, 7))
    seen = rows.attend(spans, spans.tail(count))
    wanted = [expected(p, 4) for end in (9, 7) for p in range(end - count, end)]
    assert seen == wanted
    assert rows.attend(Spans((0, 1), (9, 7), (1, 1))) == [expected(9, 4), expected(7, 4)]


@given(
    window=st.integers(1, 8),
    floor=st.integers(0, 20),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_a_window_never_reaches_below_where_its_sequence_was_rebuilt(
    window: int, floor: int, chunks: list[int]
) -> None:
    """After a prefix hit, rows before the replay do not exist: they are clipped, not read as zeros,
    which would still take part in the softmax."""
    rows, start = probe(window, 1), floor
    rows.state.slots[0].encoder_floor = floor
    for count in chunks:
        seen = rows.attend(Spans((0,), (start,), (count,)))
        assert seen == [expected(p, window, floor) for p in range(start, start + count)]
        start += count
