"""Pins stop strings over piece borders: nothing of a stop leaks, nothing else is swallowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.errors import RequestError
from cedar.text.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watcher = StopStrings(stops)
    text, matched = "", None
    for piece in pieces:
        released, matched = watcher.push(piece)
        text += released
        if matched is not None:
            break
    return text + watcher.finish(), matched


@pytest.mark.parametrize(
    ("pieces", "text", "matched"),
    [
        (["E", "ND"], "", "END"),
        (["EN", "D"], "", "END"),
        (["xEND"], "x", "END"),
        (["xE", "N", "Dy"], "x", "END"),
        (["ENX"], "ENX", None),
        (["E", "N", "X"], "ENX", None),
        (["EEN", "D"], "E", "END"),
        (["END", "more"], "", "END"),
        (["EN"], "EN", None),
    ],
)
def test_a_stop_string_over_any_border_is_found_and_a_near_miss_is_released(
    pieces: list[str], text: str, matched: str | None
) -> None:
    assert run(["END"], pieces) == (text, matched)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    watcher = StopStrings(["\n\nUser:"])
    assert watcher.push("Hello.\n\n") == ("Hello.", None)
    assert watcher.push("Us") == ("", None)
    assert watcher.push("e it") == ("\n\nUse it", None)


def test_the_stop_that_is_complete_first_wins_and_the_longest_of_equal_ends() -> None:
    assert run(["abcd", "b"], ["xabcd"]) == ("xa", "b")
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_no_text_leaves_after_a_match() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("aENDb") == ("a", "END")
    assert watcher.push("c") == ("", "END")
    assert watcher.finish() == ""


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert StopStrings([]).push("END") == ("END", None)


def test_a_single_string_is_one_stop_and_not_its_letters() -> None:
    assert run("END", ["DEND"]) == ("D", "END")  # type: ignore[arg-type]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_any_cutting_gives_the_result_of_one_piece(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    text, matched = run(stops, pieces)
    assert (text, matched) == run(stops, [whole])
    if matched is None:
        assert text == whole
        assert not any(stop in whole for stop in stops)
    else:
        assert whole.startswith(text + matched)
        assert not any(stop in (text + matched)[:-1] for stop in stops)
