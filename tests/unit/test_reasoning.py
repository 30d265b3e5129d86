"""Pins the reasoning splitter: where reasoning ends, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.text.deepseek_markers import CALLS_OPEN, THINK_CLOSE, THINK_OPEN
from cedar.text.reasoning import ReasoningSplitter, partial_length

BLOCK = f"\n\n{CALLS_OPEN}\n..."
V4_BLOCK = "\n\n<\uff5cDSML\uff5ctool_calls>\n..."


def split(pieces: list[str], starts: bool) -> tuple[str, str, list[tuple[str, str]]]:
    splitter = ReasoningSplitter(starts)
    deltas = [splitter.push(piece) for piece in pieces]
    deltas.append(splitter.finish())
    return "".join(d[0] for d in deltas), "".join(d[1] for d in deltas), deltas


CASES = [
    (True, "because</think>answer", "because", "answer"),
    (True, "because</think>\n\nanswer", "because", "\n\nanswer"),
    (True, "</think>answer", "", "answer"),
    (True, "never closed", "never closed", ""),
    (True, "a </thin b", "a </thin b", ""),
    (True, "cut short </thi", "cut short </thi", ""),
    (True, "a</think>b</think>c", "a", "b</think>c"),
    (True, "a</think>b<think>c", "a", "b<think>c"),
    (True, "<think>a</think>b", "a", "b"),
    (True, "\n<think>a</think>b", "a", "b"),
    (True, "a <think> b</think>c", "a <think> b", "c"),
    (True, "  a</think>b", "  a", "b"),
    (True, f"because{BLOCK}", "because", BLOCK),
    (True, f"because\n{BLOCK}", "because\n", BLOCK),
    (True, f"because{CALLS_OPEN}x", "because", f"{CALLS_OPEN}x"),
    (True, f"a{BLOCK}</think>b", "a", f"{BLOCK}</think>b"),
    (True, f"a</think>b{BLOCK}", "a", f"b{BLOCK}"),
    (True, f"a{V4_BLOCK}</think>b", f"a{V4_BLOCK}", "b"),
    (True, "a\n\n<\uff5cDSML\uff5c callz>", "a\n\n<\uff5cDSML\uff5c callz>", ""),
    (True, "", "", ""),
    (True, " \n", " \n", ""),
    (False, "answer", "", "answer"),
    (False, "answer</think>more", "", "answer</think>more"),
    (False, "<think>a</think>b", "a", "b"),
    (False, " \n<think>a</think>b", "a", "b"),
    (False, "say <think>", "", "say <think>"),
    (False, "<thin", "", "<thin"),
    (False, " \n", "", " \n"),
]


@pytest.mark.parametrize(("starts", "text", "reasoning", "answer"), CASES)
def test_output_is_split_at_the_end_of_reasoning(
    starts: bool, text: str, reasoning: str, answer: str
) -> None:
    assert split([text], starts)[:2] == (reasoning, answer)
    assert split(list(text), starts)[:2] == (reasoning, answer)


def test_text_leaves_as_soon_as_it_can_be_no_marker() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.push("I think ") == ("I think ", "")
    assert splitter.push("a < b\n") == ("a < b", "")
    assert splitter.push("x</th") == ("\nx", "")
    assert splitter.push("ink>yes") == ("", "yes")
    assert splitter.push("</think>") == ("", "</think>")


pieces_of_text = st.lists(
    st.sampled_from(
        [THINK_OPEN, THINK_CLOSE, CALLS_OPEN, "\n", "\n\n", "<", "</th", "ink>", "a", " ", "\uff5c"]
    ),
    max_size=8,
).map("".join)


@given(text=pieces_of_text, starts=st.booleans(), data=st.data())
def test_pieces_split_like_the_whole(text: str, starts: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning, answer, _ = split(pieces, starts)
    assert (reasoning, answer) == split([text], starts)[:2]
    assert len(reasoning) + len(answer) <= len(text)


@pytest.mark.parametrize(
    ("text", "length"), [("", 0), ("a", 0), ("a<", 1), ("</thin", 6), ("</think>", 0), ("<</", 2)]
)
def test_partial_length_counts_what_may_become_a_marker(text: str, length: int) -> None:
    assert partial_length(text, [THINK_CLOSE]) == length
