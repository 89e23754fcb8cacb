"""Maps token ids to the text and the bytes in log-probabilities. One token may be only a part of a character.

Byte-level vocabularies follow GPT-2's alphabet (256 printable characters represent bytes); SentencePiece ones spell
bytes as `<0xAB>` and a space as U+2581.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

TextOf: TypeAlias = Callable[[int], tuple[str, bytes]]
"""Token id -> its text in log-probabilities, and its bytes."""
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """Reads one tokenizer's vocabulary. Ids beyond it (padding rows of the model) have no text."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of transformers."""
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        self._tokenizer = tokenizer
        self._added = {token["id"]: token["content"] for token in spec["added_tokens"]}
        self._byte_level = '"ByteLevel"' in json.dumps([spec["decoder"], spec["pre_tokenizer"]])
        self._alphabet = byte_alphabet()
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """Return (text, bytes); bytes that are no whole character are U+FFFD in the text."""
        known = self._known.get(token_id)
        if known is None:
            raw = self._bytes(token_id)
            known = self._known[token_id] = (raw.decode(errors="replace"), raw)
        return known

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens that follow each other."""
        return b"".join(self(token)[1] for token in token_ids).decode(errors="replace")

    def numbered(self, token_id: int) -> tuple[str, bytes]:
        """Return (`token_id:N`, bytes), as vLLM's `return_tokens_as_token_ids` writes tokens."""
        return f"token_id:{token_id}", self(token_id)[1]

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        piece: str | None = self._tokenizer.backend_tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(self._alphabet[character] for character in piece if character in self._alphabet)
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte: printable Latin-1 represents itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
