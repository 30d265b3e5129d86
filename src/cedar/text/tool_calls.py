"""Reads the tool calls in a model's answer while it streams.

Lives here: the parser of the DSML block that DeepSeek-V4.1 ends an answer with.  Does not live
here: writing past calls into a prompt (:mod:`cedar.text.dsml`) and splitting off the reasoning
(:mod:`cedar.text.reasoning`, which comes first).  Called by the server and the offline API.

A block, in which white space between tags means nothing::

    <DSML calls>
    <DSML invoke name="weather">
    <DSML parameter name="city" string="true">Oslo</DSML parameter>
    <DSML parameter name="days" string="false">3</DSML parameter>
    </DSML invoke>
    </DSML calls>

A call leaves as a whole, when its block is closed: half a call cannot be taken back, and a block
that turns out to be malformed must come back as the text it is.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from cedar.text.deepseek_markers import (
    CALLS_CLOSE,
    CALLS_OPEN,
    DSML,
    INVOKE_CLOSE,
    INVOKE_NAME,
    PARAMETER_CLOSE,
    PARAMETER_NAME,
)
from cedar.text.reasoning import partial_length

_INVOKE = re.compile(rf'<{DSML}{INVOKE_NAME} name="([^"]+)">')
_PARAMETER = re.compile(rf'<{DSML}{PARAMETER_NAME} name="([^"]+)" string="(true|false)">')
_INVOKE_HEAD = f'<{DSML}{INVOKE_NAME} name="'
_PARAMETER_HEAD = f'<{DSML}{PARAMETER_NAME} name="'


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer that is no tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One complete call.

    Attributes:
        index: its place among the calls of the answer, from 0.
        id: identifies it in later messages.
        name: the function.
        arguments: a JSON object as text; strings are escaped, other values stand as the model
            wrote them.
    """

    index: int
    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Returns the entry of ``delta.tool_calls``; without ``index`` it is a message's."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Event: TypeAlias = ContentDelta | ToolCallDelta


def new_call_id() -> str:
    """Returns a call id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Parses one answer; joined, its events do not depend on how the text is cut into pieces.

    The blank line before a block is left out of the content.  A block that breaks the grammar, or
    that the answer ends within, is content, unchanged.

    Args:
        new_id: makes the id of a call.
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._held = ""
        self._block: _BlockReader | None = None
        self._opening = ""  # the block's opening tag, with the blank line before it
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Takes the next piece and returns what it completes, in order."""
        return self._advance(text, is_end=False)

    def finish(self) -> list[Event]:
        """Returns what is still held back when the answer ends."""
        return self._advance("", is_end=True)

    def _advance(self, text: str, is_end: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            if self._block is None:
                self._held += text
                if not self._open_block(events, is_end):
                    return events
                text, self._held = self._held, ""
            reader = self._block
            assert reader is not None
            try:
                is_closed = reader.feed(text)
                if not is_closed and is_end:
                    raise _MalformedError
            except _MalformedError:
                # The text behind the opening tag may hold another block, so it is searched again.
                self._emit(events, self._opening)
                text, self._block = reader.everything(), None
                continue
            if not is_closed:
                return events
            for name, arguments in reader.calls:
                events.append(ToolCallDelta(self._num_calls, self._new_id(), name, arguments))
                self._num_calls += 1
            text, self._block = reader.rest(), None

    def _open_block(self, events: list[Event], is_end: bool) -> bool:
        """Releases the content in front of the next block; returns whether there is one."""
        start = self._held.find(CALLS_OPEN)
        if start < 0:
            keep = 0 if is_end else partial_length(self._held, (CALLS_OPEN, "\n\n" + CALLS_OPEN))
            self._emit(events, self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        end = start + len(CALLS_OPEN)
        if self._held[:start].endswith("\n\n"):
            start -= 2
        self._emit(events, self._held[:start])
        self._opening, self._held = self._held[start:end], self._held[end:]
        self._block = _BlockReader()
        return True

    @staticmethod
    def _emit(events: list[Event], text: str) -> None:
        if text:
            events.append(ContentDelta(text))


class _MalformedError(Exception):
    """The text cannot become a block any more."""


@dataclass(slots=True)
class _BlockReader:
    """Reads what follows an opening tag, one tag or value at a time, and never again.

    Attributes:
        calls: name and JSON arguments of each complete call.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    _text: str = ""
    _waiting: list[str] = field(default_factory=list)  # pieces to be added to _text
    _at: int = 0  # everything before it has been read
    _searched: int = 0  # no closing tag begins before it
    _name: str | None = None  # of the call being read
    _values: dict[str, str] = field(default_factory=dict)
    _parameter: tuple[str, bool] | None = None  # name of the parameter being read, is it a string

    def feed(self, text: str) -> bool:
        """Takes more text; returns whether the block is closed.

        Raises:
            _MalformedError: the grammar is broken.
        """
        self._waiting.append(text)
        if self._parameter is not None and ">" not in text:
            return False  # a value ends with a tag; joining at each piece would be quadratic
        self._text = self.everything()
        self._waiting.clear()
        while True:
            if self._parameter is not None:
                is_read = self._read_value()
            else:
                self._skip_space()
                if self._text.startswith(CALLS_CLOSE, self._at) and self._name is None:
                    if not self.calls:
                        raise _MalformedError
                    self._at += len(CALLS_CLOSE)
                    return True
                is_read = self._read_call() if self._name is None else self._read_body()
            if not is_read:
                return False

    def everything(self) -> str:
        """Returns all text taken so far."""
        return "".join((self._text, *self._waiting))

    def rest(self) -> str:
        """Returns the text behind the closing tag."""
        return self._text[self._at :]

    def _read_call(self) -> bool:
        tag = self._take_tag(_INVOKE_HEAD, CALLS_CLOSE)
        if tag is None:
            return False
        match = _INVOKE.fullmatch(tag) or _fail()
        self._name, self._values = match[1], {}
        return True

    def _read_body(self) -> bool:
        """Reads the next tag inside a call, or the JSON object that may stand for parameters."""
        if self._text.startswith("{", self._at) and not self._values:
            body = self._take_until(INVOKE_CLOSE)
            if body is None:
                return False
            self._end_call(_checked_json(body.rstrip()))
            return True
        tag = self._take_tag(_PARAMETER_HEAD, INVOKE_CLOSE)
        if tag is None:
            return False
        if tag == INVOKE_CLOSE:
            pairs = (f"{_to_json(name)}: {value}" for name, value in self._values.items())
            self._end_call("{" + ", ".join(pairs) + "}")
            return True
        match = _PARAMETER.fullmatch(tag) or _fail()
        if match[1] in self._values:
            raise _MalformedError
        self._parameter = (match[1], match[2] == "true")
        return True

    def _read_value(self) -> bool:
        assert self._parameter is not None
        value = self._take_until(PARAMETER_CLOSE)
        if value is None:
            return False
        name, is_string = self._parameter
        self._values[name] = _to_json(value) if is_string else _checked_json(value)
        self._parameter = None
        return True

    def _end_call(self, arguments: str) -> None:
        assert self._name is not None
        self.calls.append((self._name, arguments))
        self._name = None

    def _skip_space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _take_tag(self, *starts: str) -> str | None:
        """Takes the tag that begins here; None while it is not complete."""
        seen = self._text[self._at : self._at + max(map(len, starts))]
        if not any(seen.startswith(start) or start.startswith(seen) for start in starts):
            raise _MalformedError
        end = self._text.find(">", self._at)
        if end < 0:
            return None
        tag, self._at = self._text[self._at : end + 1], end + 1
        return tag

    def _take_until(self, close: str) -> str | None:
        """Takes the text up to ``close``, and ``close``; None while it has not come."""
        end = self._text.find(close, max(self._at, self._searched))
        if end < 0:
            self._searched = max(self._at, len(self._text) - len(close) + 1)
            return None
        value, self._at = self._text[self._at : end], end + len(close)
        return value


def _fail() -> NoReturn:
    raise _MalformedError


def _to_json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _checked_json(text: str) -> str:
    """Returns ``text`` if it is JSON: what goes to the client must be."""
    try:
        json.loads(text, parse_constant=lambda _: _fail())
    except (ValueError, RecursionError) as error:
        raise _MalformedError from error
    return text
