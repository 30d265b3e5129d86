"""Keeps a user's strings apart from a template's own text while a Jinja template is rendered.

Lives here: strings that a template can examine and cut as usual, but that come out of it as
placeholders, and the way back from the rendered text.  Does not live here: Jinja itself
(:mod:`cedar.text.jinja_template`, the only caller).

A template returns one string.  Whatever looks like a control token in it must have been written by
the template: a user's string is therefore rendered as a placeholder of private-use characters, with
a random part that nobody can guess, and put back as text after the control tokens have been found.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, SupportsIndex

from cedar.errors import CheckpointError

_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
_DIGITS = "".join(chr(0xF100 + i) for i in range(10))
_TO_DIGITS = str.maketrans("0123456789", _DIGITS)
_FROM_DIGITS = str.maketrans(_DIGITS, "0123456789")


class TextVault:
    """Holds the strings of one rendering."""

    def __init__(self) -> None:
        self._nonce = "".join(chr(0xE000 + secrets.randbelow(4096)) for _ in range(8))
        self._placeholder = re.compile(f"{_OPEN}{self._nonce}([{_DIGITS}]+){_CLOSE}")
        self._texts: list[str] = []

    def guard(self, value: Any) -> Any:
        """Returns a JSON value in which every string, keys included, is guarded."""
        if isinstance(value, GuardedText):
            return value
        if isinstance(value, str):
            self._texts.append(str.__str__(value))  # without a subclass like Markup
            number = str(len(self._texts) - 1).translate(_TO_DIGITS)
            return GuardedText(f"{_OPEN}{self._nonce}{number}{_CLOSE}", value, self)
        if isinstance(value, Mapping):
            return {self.guard(key): self.guard(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.guard(entry) for entry in value]
        if isinstance(value, tuple):
            return tuple(self.guard(entry) for entry in value)
        return value

    def reveal(self, value: Any) -> Any:
        """Returns ``value`` with the real strings, placeholders inside strings included."""
        if isinstance(value, str):
            return self._placeholder.sub(lambda match: self._text_of(match[1]), str.__str__(value))
        if isinstance(value, Mapping):
            return {self.reveal(key): self.reveal(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.reveal(entry) for entry in value]
        return value

    def split(self, rendered: str) -> list[str]:
        """Returns the template's text and the user's in turns; the first piece is the template's.

        Raises:
            CheckpointError: the template cut a placeholder, so the user's text would be lost.
        """
        pieces = self._placeholder.split(rendered)
        for i, piece in enumerate(pieces):
            if i % 2:
                pieces[i] = self._text_of(piece)
            elif _OPEN in piece or _CLOSE in piece:
                raise CheckpointError(
                    "the chat template joins a message with other text and then cuts the result; "
                    "cedar cannot keep user text and control tokens apart there. Pass a template "
                    "that cuts messages before it joins them"
                )
        return pieces

    def _text_of(self, digits: str) -> str:
        return self._texts[int(digits.translate(_FROM_DIGITS))]


def on_real_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that reads the real text of guarded arguments and guards its result."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for guarded in arguments:
            if isinstance(guarded, GuardedText):
                return guarded._apply(function, *arguments, **named)
        return function(*arguments, **named)

    return call


# What templates call on strings. Other methods see the placeholder, which they leave whole.
_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower",
    "isspace", "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
    "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
    "strip", "swapcase", "title", "upper",
})  # fmt: skip


class GuardedText(str):
    """A user's string: methods and comparisons work on the real text, output is a placeholder.

    Results that are strings are guarded again.  Joining it with other text gives the placeholder.
    """

    _original: str
    _vault: TextVault

    def __new__(cls, placeholder: str, original: str, vault: TextVault) -> GuardedText:
        """Makes the string; only :meth:`TextVault.guard` calls this."""
        text = super().__new__(cls, placeholder)
        text._original = original
        text._vault = vault
        return text

    def __getattribute__(self, name: str) -> Any:
        if name in _METHODS:
            return partial(self._call, name)
        return super().__getattribute__(name)

    def __str__(self) -> str:
        return self  # str() would copy the placeholder out of this class

    def __repr__(self) -> str:
        return str(self._vault.guard(repr(self._original)))

    def __hash__(self) -> int:
        return hash(self._original)

    def __len__(self) -> int:
        return len(self._original)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == self._vault.reveal(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return bool(self._original < self._vault.reveal(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._original > self._vault.reveal(other))

    def __contains__(self, part: object) -> bool:
        return self._vault.reveal(part) in self._original

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return str(self._call("__getitem__", key))

    def _apply(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls ``function`` with real strings and returns its result guarded."""
        real = [
            tuple(map(self._vault.reveal, argument))
            if isinstance(argument, tuple)
            else self._vault.reveal(argument)
            for argument in arguments
        ]
        return self._vault.guard(function(*real, **named))

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._apply(getattr(self._original, method), *arguments, **named)
