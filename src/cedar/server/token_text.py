"""How single tokens are shown in log-probabilities: as text, or as bytes when they are no text."""

from __future__ import annotations

from functools import lru_cache

from cedar.text.tokenizer import Tokenizer

#: Lowest log-probability that is sent: JSON has no infinity. The value is vLLM's.
FLOOR = -9999.0


class TokenText:
    """Names of tokens.

    Args:
        tokenizer: None for a model without one; tokens are then shown as `token_id:N`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.name = lru_cache(maxsize=65536)(self._name)

    def content(self, token_id: int) -> bytes | None:
        """The bytes a token stands for; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        spelled = self._tokenizer.id_to_token(token_id)
        table = _byte_of_character()
        if spelled is None:
            return b""
        if token_id not in self._tokenizer.control_ids and all(c in table for c in spelled):
            return bytes(table[character] for character in spelled)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def byte_list(self, token_id: int) -> list[int] | None:
        """`content` as JSON has it."""
        content = self.content(token_id)
        return None if content is None else list(content)

    def _name(self, token_id: int) -> str:
        """Text of a token; `bytes:\\xNN...` as OpenAI writes a part of a character."""
        content = self.content(token_id)
        if content is None:
            return f"token_id:{token_id}"
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Byte of each character that byte-level vocabularies spell bytes with.

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on (GPT-2's rule).
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {chr(byte): byte for byte in kept}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(moved)}
