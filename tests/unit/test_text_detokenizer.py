"""Pins streaming detokenisation: pieces join to the full decode and no half character leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.text.detokenizer import IncrementalDetokenizer

SPECIAL = 256


class ByteTokenizer:
    """Ids 0-255 are single bytes; 256 is a control token."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        marker = b"" if skip_special_tokens else b"<S>"
        return b"".join(marker if i == SPECIAL else bytes([i]) for i in ids).decode(
            errors="replace"
        )


def stream(ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), skip_special_tokens=skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("character", ["é", "漢", "€", "😀"])
def test_a_character_of_several_tokens_leaves_whole_with_its_last_byte(character: str) -> None:
    size = len(character.encode())
    assert size > 1
    assert stream(list(f"a{character}b".encode())) == ["a", *[""] * (size - 1), character, "b", ""]


def test_an_unfinished_character_leaves_as_one_replacement_at_the_end() -> None:
    assert stream(list("ok😀".encode())[:-1]) == ["o", "k", "", "", "", "\ufffd"]


def test_a_byte_that_begins_no_character_leaves_once_that_is_certain() -> None:
    assert stream([0x80, 0x41]) == ["", "\ufffdA", ""]


def test_control_tokens_are_left_out_or_kept_as_asked() -> None:
    assert "".join(stream([65, SPECIAL, 66])) == "AB"
    assert "".join(stream([65, SPECIAL, 66], skip=False)) == "A<S>B"


def test_a_decoder_that_drops_the_first_blank_does_not_lose_blanks_between_pieces() -> None:
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join((" one", " two", " three")[i] for i in ids).removeprefix(" ")

    detokenizer = IncrementalDetokenizer(Words())
    assert [detokenizer.push(i) for i in (0, 1, 2)] == ["one", " two", " three"]


def test_a_long_run_of_broken_bytes_does_not_make_steps_longer() -> None:
    tokenizer = ByteTokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push(0x80) for _ in range(500)) + detokenizer.finish()
    assert text == "\ufffd" * 500
    assert tokenizer.longest < 100


def test_control_tokens_after_an_unfinished_character_do_not_split_it() -> None:
    ids = [0x80] * 22 + [0xF0, 0x9F, 0x98] + [SPECIAL] * 8 + [0x80, 65]
    assert "".join(stream(ids)) == "\ufffd" * 22 + "😀A"


bytes_of_text = st.text().map(lambda text: list(text.encode()))
broken_bytes = st.lists(st.integers(0, SPECIAL), max_size=120)
stuck_bytes = st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x41, SPECIAL]), max_size=120)


@given(ids=st.one_of(bytes_of_text, broken_bytes, stuck_bytes), skip=st.booleans())
def test_joined_pieces_equal_the_full_decode(ids: list[int], skip: bool) -> None:
    pieces = stream(ids, skip)
    assert "".join(pieces) == ByteTokenizer().decode(ids, skip_special_tokens=skip)


@given(text=st.text().filter(lambda text: "\ufffd" not in text))
def test_well_formed_text_never_shows_a_replacement_on_the_way(text: str) -> None:
    assert not any("\ufffd" in piece for piece in stream(list(text.encode())))
