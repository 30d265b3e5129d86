"""Prompts as segments: control tokens and ordinary text, kept apart until they are token ids.

Lives here: the two kinds of segment and the step from segments to ids.  Does not live here: what a
chat format writes (:mod:`cedar.text.chat_template`) and the vocabulary
(:mod:`cedar.text.tokenizer`).  Called by every chat format, the server and the offline API.

A prompt is never one string that is searched for control tokens: a user who types the text of one
would then end a turn or speak as the system.  A chat format writes a :class:`Marker` where it means
a control token and :class:`Text` for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cedar.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Marker:
    """One control token, spelled as in ``tokenizer.json``."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text; encoded so that it never yields a control token, whatever it says."""

    text: str


Segment: TypeAlias = Marker | Text


def to_text(segments: Iterable[Segment]) -> str:
    """Returns the prompt as one string, for reading and for tests; encoding it is not safe."""
    return "".join(segment.text for segment in segments)


def join_texts(segments: Iterable[Segment]) -> list[Segment]:
    """Joins neighbouring texts and drops empty ones.

    A vocabulary merges characters across the seam of two texts, so only joined texts get the ids
    that the model was trained on.
    """
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if isinstance(segment, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + segment.text)
        elif segment.text:
            joined.append(segment)
    return joined


def marker_pattern(markers: Iterable[str]) -> re.Pattern[str]:
    """Returns the pattern that finds ``markers`` in text; where two match, the longer one wins."""
    longest_first = sorted((marker for marker in markers if marker), key=len, reverse=True)
    alternatives = "|".join(re.escape(marker) for marker in longest_first)
    return re.compile(f"({alternatives})" if alternatives else "((?!))")


def split_at_markers(text: str, pattern: re.Pattern[str]) -> list[Segment]:
    """Splits text of our own or of a model directory; never call it on a user's words.

    Args:
        text: a template's literal text or an instruction of the chat format.
        pattern: from :func:`marker_pattern`.
    """
    pieces = pattern.split(text)
    return [Marker(piece) if i % 2 else Text(piece) for i, piece in enumerate(pieces) if piece]


class SegmentEncoder(Protocol):
    """What :func:`encode_segments` needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ordinary text, none of them a control token's."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of one vocabulary entry, None where there is none."""
        ...


def encode_segments(segments: Sequence[Segment], tokenizer: SegmentEncoder) -> list[int]:
    """Returns the token ids of a prompt; nothing is added in front of it or behind it.

    Raises:
        CheckpointError: the vocabulary lacks a control token that the chat format writes.
    """
    ids: list[int] = []
    for segment in join_texts(segments):
        if isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
            continue
        token_id = tokenizer.token_to_id(segment.text)
        if token_id is None:
            raise CheckpointError(
                f"the chat format writes the control token {segment.text!r}, which the vocabulary "
                "does not have; use the tokenizer.json that belongs to this model"
            )
        ids.append(token_id)
    return ids
