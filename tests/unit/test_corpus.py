"""Pins the decoders and the cleaning of the training texts."""

from __future__ import annotations

import struct
import zlib

import pytest

from cedar.training import corpus


def test_typographic_marks_become_ascii_and_blanks_single() -> None:
    text = "\u201cWait\u2026\u201d\u2014he\u00a0 said,\r\n\r\n\r\n\r\n  \u2018no\u2019 "
    assert corpus.normalise(text) == "\"Wait...\"--he said,\n\n'no'"


def test_wrapped_lines_join_and_paragraphs_and_verse_stay() -> None:
    text = "One two\nthree.\n\nSaid he:\n  First line\n  second line"
    assert corpus.join_wrapped(text) == "One two three.\n\nSaid he:\nFirst line\nsecond line"


def test_a_novel_loses_italic_marks_and_footnotes() -> None:
    text = "A _very_ fine\nwhale.*\n\n*See below.\n\nThe snake_case end."
    assert corpus.clean_novel(text) == "A very fine whale.\n\nThe snakecase end."


def test_a_speech_loses_notes_audience_and_tables_but_keeps_its_words() -> None:
    text = (
        "[Released January 21, 1946]\nThe President. Good evening. [Laughter] We [the States] are "
        "[trending; White House correction] up.\nAudience members. Boo!\n"
        "Total 1,234 5,678 9,999\nNet exports ...... 2 ......\nIn 1945 we won the war."
    )
    assert corpus.clean_speech(text) == (
        "Good evening. We the States are trending up.\n\nIn 1945 we won the war."
    )


def sword_module(*blocks: bytes) -> tuple[bytes, bytes]:
    index, data = b"", b""
    for block in blocks:
        packed = zlib.compress(block)
        index += struct.pack("<III", len(data), len(packed), len(block))
        data += packed
    return index, data


def test_sword_blocks_join_in_index_order_even_inside_a_character() -> None:
    whale = "dé".encode()
    assert corpus.decode_sword_blocks(*sword_module(b"abc", whale[:2], whale[2:])) == "abcdé"


def test_a_sword_block_of_another_size_is_an_error() -> None:
    index, data = sword_module(b"abc")
    with pytest.raises(ValueError, match="the index says 4"):
        corpus.decode_sword_blocks(index[:8] + struct.pack("<I", 4), data)


OSIS = (
    '<milestone n="importer"/><div canonical="true" osisID="Gen" sID="a" type="book"/>'
    '<title type="main">Genesis</title><chapter n="1" osisID="Gen.1" sID="Gen.1"/>'
    '<div sID="p1" type="x-p"/> <w lemma="x">In</w> <w>the beginning</w>,'
    '<note><rdg>Or: at</rdg></note> God<note>Elohim</note><w>made</w> it.<div eID="p1" type="x-p"/>'
    '<table><row><cell>Outline</cell></row></table><hi type="bold">Verses 1-2</hi>'
    '<lg sID="g"/><l level="1" sID="l1"/>Tom &amp; Jerry<l eID="l1" level="1"/> '
    '<l level="2" sID="l2"/>sang\u201d <l eID="l2" level="2"/><lg eID="g"/>'
    '<div eID="a" osisID="Gen" type="book"/>'
    '<div canonical="true" osisID="Exod" sID="b" type="book"/>Now'
)


def test_osis_text_is_cut_into_books() -> None:
    parts = list(corpus.split_osis(OSIS, corpus.OSIS_BOOK))
    assert [book for book, _ in parts] == ["Gen", "Exod"]
    assert "".join(part for _, part in parts) == OSIS[OSIS.index("<div canonical") :]


def test_osis_text_keeps_paragraphs_and_verse_lines_and_drops_notes_and_headings() -> None:
    genesis = dict(corpus.split_osis(OSIS, corpus.OSIS_BOOK))["Gen"]
    assert corpus.osis_to_text(genesis) == (
        'Chapter 1\n\nIn the beginning, God made it.\n\nTom & Jerry\nsang"'
    )


def character_vector(version: int, *strings: bytes | None) -> bytes:
    plain = b"X\n" + struct.pack(">3i", version, 0x40201, 0x30500)
    if version == 3:
        plain += struct.pack(">i", 5) + b"UTF-8"
    plain += struct.pack(">2i", 16, len(strings))
    for text in strings:
        plain += struct.pack(">2i", 0x40009, -1 if text is None else len(text)) + (text or b"")
    return plain


def rdb_record(plain: bytes) -> bytes:
    return struct.pack(">I", len(plain)) + zlib.compress(plain)


@pytest.mark.parametrize("version", [2, 3])
def test_r_database_records_give_their_strings(version: int) -> None:
    first = character_vector(version, b"EMMA", b"", None, "é".encode())
    database = rdb_record(first) + rdb_record(character_vector(version, b"second"))
    assert list(corpus.decode_rdb(database)) == [["EMMA", "", "", "é"], ["second"]]


def test_r_records_that_are_no_character_vectors_are_errors() -> None:
    number = b"X\n" + struct.pack(">3i", 2, 0, 0) + struct.pack(">2i", 14, 1) + bytes(8)
    with pytest.raises(ValueError, match="type 14"):
        list(corpus.decode_rdb(rdb_record(number)))
    with pytest.raises(ValueError, match="XDR"):
        list(corpus.decode_rdb(rdb_record(b"A\n")))
    with pytest.raises(ValueError, match="header says"):
        list(corpus.decode_rdb(struct.pack(">I", 3) + zlib.compress(b"X\n")))


def test_a_play_keeps_speakers_verse_lines_and_stage_directions() -> None:
    text = "# Hamlet\n\n## ACT I\n\n_Enter Ghost_\n\n**BERNARDO**  \nWho's there?  \nStand."
    assert corpus.play_to_text(text) == (
        "Hamlet\n\nACT I\n\n[Enter Ghost]\n\nBERNARDO.\nWho's there?\nStand."
    )
