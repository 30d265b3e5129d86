"""Decoding and cleaning of the public texts that the small model is trained on.

Lives here: pure functions from the file formats in which registry packages carry their texts (SWORD
z-text modules, R lazy-load databases, play Markdown, chat JSON) to clean plain text.  Does not live
here: downloading, the choice of sources and the held-out split (``tools/build_corpus.py``), and
anything about tokens (:mod:`cedar.training.data`).  Standard library only.
"""

from __future__ import annotations

import html
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

USER_MARKER = "<|user|>"
ASSISTANT_MARKER = "<|assistant|>"
END_MARKER = "<|end|>"

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
    xml = re.sub(r'<div [^>]*type="(x-p|x-m|introduction|book)"[^>]*>|</?(lg|list)\b[^>]*>', "\n\n", xml)
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


# Stems of rude and sexual words; a chat with one of them is dropped as a whole.
_RUDE = re.compile(
    r"\b(?:\w*fuc?k\w*|\w*shit\w*|bitch\w*|bastard\w*|ass|asses|asshole\w*|dumbass|crap\w*|damn\w*|"
    r"dick|dicks|cock|cocks|pussy|cunt\w*|whore\w*|slut\w*|fag\w*|nigg\w*|retard\w*|raped?|raping|"
    r"sex\w*|porn\w*|nude\w*|naked|boob\w*|penis|vagina|horny|orgasm\w*|masturbat\w*|gay|lesbian\w*|"
    r"suicid\w*|nazi\w*|hitler|wtf|stfu|hell|pee|poop\w*|fart|farts|farted|cocaine|heroin)\b",
    re.I,
)
# Talk about the collection itself (its score board and assistant), addresses and long numbers.
_OFF_TOPIC = re.compile(
    r"https?:|www\.|@\w|\d{6,}|leader ?board|top ten|top 10|eve project|project eve|this app\b|chit ?chat|"
    r"gift card|\braffle|\bchats?\b|\bpoints\b|challenge",
    re.I,
)


# A message that ends in one of these words, or at the length limit, goes on in the next message.
_OPEN_END = re.compile(
    r"\b(a|an|the|to|of|and|or|but|so|my|your|our|his|her|their|in|on|at|with|for|from|is|are|was|"
    r"that|because|if|when|like|than|as|by|about|very|really)$|^.{170,}$",
    re.I | re.S,
)


def chat_turns(messages: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Merges consecutive messages of one sender into turns; returns [] unless two people alternate."""
    turns: list[str] = []
    senders: list[str] = []
    for message in (message for group in messages for message in group):
        text = normalise(str(message["text"])).replace("\n", " ")
        if not re.search(r"[A-Za-z0-9]", text):
            continue
        if not senders or senders[-1] != message["sender"]:
            turns.append(text)
            senders.append(str(message["sender"]))
        elif turns[-1][-1] in ".!?,-" or _OPEN_END.search(turns[-1]):
            turns[-1] = f"{turns[-1]} {text}"
        else:
            turns[-1] = f"{turns[-1]}{_stop_mark(turns[-1])} {text}"
    if len(set(senders)) != 2:
        return []
    return [tidy for turn in turns if (tidy := tidy_message(turn))]


def clean_stretches(turns: Sequence[str], minimum: int = 4) -> list[list[str]]:
    """Cuts a chat at turns about the collection itself; a chat with a rude word gives nothing.

    Returns:
        Stretches of at least ``minimum`` turns, each of an even number, so every turn has an answer.
    """
    if any(_RUDE.search(turn) for turn in turns):
        return []
    stretches: list[list[str]] = [[]]
    for turn in turns:
        if _OFF_TOPIC.search(turn):
            stretches.append([])
        else:
            stretches[-1].append(turn)
    even = [stretch[: len(stretch) // 2 * 2] for stretch in stretches]
    return [stretch for stretch in even if len(stretch) >= minimum]


_QUESTION = re.compile(
    r"(?:what|whats|what's|how|hows|how's|where|who|why|when|which|do you|did you|are you|were you|"
    r"have you|can you|will you|would you|is it|is there|don't you|does it|any)\b[^.!?]*$",
    re.I,
)


def _stop_mark(text: str) -> str:
    sentence = re.split(r"[.!?] ", text)[-1]
    return "?" if _QUESTION.match(sentence) else "."


_SPELLING = {
    "i": "I", "im": "I'm", "ive": "I've", "id": "I'd", "i'm": "I'm", "i've": "I've", "i'd": "I'd",
    "i'll": "I'll", "dont": "don't", "cant": "can't", "didnt": "didn't", "doesnt": "doesn't",
    "isnt": "isn't", "wasnt": "wasn't", "arent": "aren't", "wouldnt": "wouldn't",
    "couldnt": "couldn't", "shouldnt": "shouldn't", "havent": "haven't", "hasnt": "hasn't",
    "thats": "that's", "whats": "what's", "youre": "you're", "theyre": "they're", "hows": "how's",
    "theres": "there's", "u": "you", "ur": "your", "r": "are", "n": "and", "bc": "because",
    "cuz": "because", "idk": "I don't know", "thx": "thanks", "pls": "please", "alot": "a lot",
}  # fmt: skip


def tidy_message(text: str) -> str:
    """Repairs the commonest chat spellings, capitalises sentences and ends with a stop mark."""
    text = re.sub(r"[^\x20-\x7e]|[:;]-?[)(DPp]|<3|\bx[dD]\b", "", text)
    text = re.sub(r"([A-Za-z])\1{2,}", r"\1\1", text)
    text = re.sub(r"([!?])[!?]*", r"\1", re.sub(r"\.{2,}", "...", text))

    def respell(match: re.Match[str]) -> str:
        word = match.group(0)
        fixed = _SPELLING.get(word.lower(), word)
        return fixed[0].upper() + fixed[1:] if word[0].isupper() else fixed

    text = re.sub(r"(?<![\w'])[A-Za-z]+(?:'[a-z]+)?(?![\w'])", respell, text)
    text = re.sub(r" +([.,!?])", r"\1", re.sub(r" {2,}", " ", text)).strip(" ,-~")
    if not re.search(r"[A-Za-z0-9]", text):
        return ""
    text = re.sub(r"(^|[.!?] )([a-z])", lambda match: match.group(1) + match.group(2).upper(), text)
    return text if text[-1] in ".!?" else text + _stop_mark(text)


def render_chat(turns: Sequence[str]) -> str:
    """Writes alternating turns as ``<|user|>..<|end|><|assistant|>..<|end|>``, opener = user."""
    markers = (USER_MARKER, ASSISTANT_MARKER)
    return "".join(f"{markers[i % 2]}{turn}{END_MARKER}" for i, turn in enumerate(turns))
