"""Decoding and cleaning of the public texts that the small model is trained on.

Lives here: pure functions from the file formats in which registry packages carry their texts
(SWORD z-text modules, R lazy-load databases, play Markdown) to clean plain text.  Does not live
here: chats (:mod:`cedar.training.chats`), downloading, the choice of sources and the held-out
split (``tools/build_corpus.py``), and anything about tokens (:mod:`cedar.training.data`).
Standard library only.
"""

from __future__ import annotations

import html
import re
import struct
import zlib
from collections.abc import Iterator

_TYPOGRAPHIC = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201a": "'",
        "\u201b": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u201e": '"',
        "\u2010": "-",
        "\u2011": "-",
        "\u2012": "-",
        "\u2013": "-",
        "\u2014": "--",
        "\u2015": "--",
        "\u2026": "...",
        "\u2044": "/",
        "\u00a0": " ",
        "\u2009": " ",
        "\u200b": "",
        "\ufeff": "",
        "\u00ad": "",
        "\r": "\n",
        "\t": " ",
        "\f": "\n",
    }
)


def normalise(text: str) -> str:
    """Returns ``text`` with ASCII quotes and dashes, single blanks and single blank lines.

    A line break stays a line break; two or more become one paragraph break.
    """
    text = text.replace("\r\n", "\n").translate(_TYPOGRAPHIC)
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    text = re.sub(r"-{3,}", "--", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def join_wrapped(text: str) -> str:
    """Joins hard-wrapped lines into one line per paragraph.

    Blank lines separate paragraphs.  A line that starts with two or more blanks is verse or a
    quotation set line by line, so it keeps its own line.
    """
    paragraphs = []
    for block in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n")):
        joined = ""
        for line in block.split("\n"):
            if not line.strip():
                continue
            gap = "" if not joined else "\n" if re.match(r"\s{2,}", line) else " "
            joined += gap + line.strip()
        if joined:
            paragraphs.append(joined)
    return "\n\n".join(paragraphs)


def clean_novel(text: str) -> str:
    """Cleans a hard-wrapped novel: paragraphs joined, ``_italics_`` and ``*`` footnotes removed."""
    text = re.sub(r"(?<!\w)_([^_]+?)_(?!\w)", r"\1", join_wrapped(text))
    kept = [block for block in text.split("\n\n") if not block.startswith("*")]
    return normalise("\n\n".join(kept).replace("*", "").replace("_", ""))


_STAGE_NOTE = re.compile(
    r"laugh|applau|note|audience|inaudible|deliver|released|before|after|disrupt|spoke|\d", re.I
)


def clean_speech(text: str) -> str:
    """Cleans the transcript of a speech: no stage notes, speaker labels, audience lines or tables.

    ``[Laughter]`` and other notes of the transcriber go; ``[word; White House correction]`` and
    brackets around words of the speech itself keep the words.
    """

    def unbracket(match: re.Match[str]) -> str:
        inside = match.group(1)
        if "correction" in inside:
            return inside.split(";")[0].strip()
        return "" if _STAGE_NOTE.search(inside) else inside

    kept = []
    for line in re.sub(r"\[([^\]]*)\]", unbracket, text).split("\n"):
        line = re.sub(r"^\s*(The President\.|\u2022)\s+", "", line).replace("\u2022", "-").strip()
        figures = sum(character in "0123456789.,$%()+- " for character in line)
        is_table = bool(line) and (figures > 0.45 * len(line) or "...." in line)
        if is_table or re.match(r"Audience members?\.|Jump to", line):
            continue
        kept.append(line)
    return normalise(re.sub(r" +([.,;:!?])", r"\1", "\n\n".join(kept)))


def decode_sword_blocks(index: bytes, data: bytes) -> str:
    """Decodes a SWORD compressed module: every block of it, in order, as OSIS XML text.

    Args:
        index: the ``.?zs`` file: little-endian u32 triples (offset, packed size, plain size).
        data: the ``.?zz`` file: one zlib stream per block.

    Raises:
        ValueError: a block unpacks to another size than its index entry says.
    """
    blocks = []
    for offset, packed, plain in struct.iter_unpack("<III", index):
        block = zlib.decompress(data[offset : offset + packed])
        if len(block) != plain:
            raise ValueError(f"block at {offset}: {len(block)} bytes, the index says {plain}")
        blocks.append(block)
    return b"".join(blocks).decode("utf-8")


def split_osis(xml: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Cuts OSIS text before each match of ``pattern``, whose group 1 is the part's id.

    Text before the first match (prefaces, importer marks) is dropped.
    """
    marks = list(re.finditer(pattern, xml))
    ends = [mark.start() for mark in marks[1:]] + [len(xml)]
    for mark, end in zip(marks, ends, strict=True):
        yield mark.group(1), xml[mark.start() : end]


OSIS_BOOK = r'<div [^>]*osisID="(\w+)" sID[^>]*type="book"[^>]*>'
OSIS_CHAPTER = r'<chapter [^>]*osisID="([\w.]+)" sID[^>]*>'


def osis_to_text(xml: str) -> str:
    """Turns OSIS XML into plain text with one paragraph per ``p`` and one line per verse line.

    Notes, outlines (tables), section titles and bold verse-range headings are dropped; a chapter
    start becomes a heading line.
    """
    xml = re.sub(r"(?s)<(note|table|title|speaker)\b[^>]*?(?<!/)>.*?</\1>", " ", xml)
    xml = re.sub(r'<hi type="bold">\s*Verses? [\d\s,-]+\.?</hi>', "", xml)
    xml = re.sub(r'<chapter n="(\d+)"[^>]*sID[^>]*>', r"\n\nChapter \1\n\n", xml)
    xml = re.sub(
        r'<div [^>]*type="(x-p|x-m|introduction|book)"[^>]*>|</?(lg|list)\b[^>]*>', "\n\n", xml
    )
    xml = re.sub(r"<(l|lb|item)\b(?![^>]*eID)[^>]*>", "\n", xml)
    text = html.unescape(re.sub(r"<[^>]+>", "", xml))
    return normalise(re.sub(r"[^\S\n]+([.,;:!?\u201d\u2019)])", r"\1", text))


def decode_rdb(database: bytes) -> Iterator[list[str]]:
    """Yields every character vector of an R lazy-load database (``.rdb``).

    A record is a big-endian u32 with the plain size, then a zlib stream holding an XDR-serialised
    object.  Only character vectors are decoded; NA becomes the empty string.

    Raises:
        ValueError: a record is not a character vector, or its size is wrong.
    """
    position = 0
    while position < len(database):
        (size,) = struct.unpack_from(">I", database, position)
        stream = zlib.decompressobj()
        plain = stream.decompress(database[position + 4 :])
        if len(plain) != size:
            raise ValueError(f"record at {position}: {len(plain)} bytes, its header says {size}")
        yield _decode_character_vector(plain)
        position = len(database) - len(stream.unused_data)


def _decode_character_vector(plain: bytes) -> list[str]:
    if plain[:2] != b"X\n":
        raise ValueError(f"not an XDR serialisation: starts with {plain[:2]!r}")
    version, _, _ = struct.unpack_from(">3i", plain, 2)
    position = 14
    if version == 3:  # version 3 adds the name of the native encoding
        position += 4 + int.from_bytes(plain[14:18], "big")
    kind, count = struct.unpack_from(">2i", plain, position)
    if kind & 0xFF != 16:
        raise ValueError(f"not a character vector: type {kind & 0xFF}, expected 16")
    position += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", plain, position + 4)
        position += 8
        strings.append(plain[position : position + max(length, 0)].decode("utf-8"))
        position += max(length, 0)
    return strings


def play_to_text(markdown: str) -> str:
    """Turns a play in Markdown into text: ``NAME.`` above each speech, one line per verse line."""
    text = re.sub(r"(?m)^#+ *", "", markdown)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\1.", text)
    text = re.sub(r"(?<!\w)_([^_]+?)_(?!\w)", r"[\1]", text)
    return normalise(text)
