"""Incremental detokenization: takes tokens, returns text of whole characters only.

Invariant: the joined texts equal the tokenizer's decoding of all tokens at once. One exception, an improvement: in a run of
byte-fallback tokens that is not UTF-8, valid characters survive, where decoding at once spoils the whole run.
"""

import codecs
from enum import Enum, auto
from typing import Protocol

REPLACEMENT = "\ufffd"
_WINDOW = 8
_LONGEST_CHARACTER = 4
_CONTEXT_SEARCH = 16
_ASCII_BYTES = range(0x80)


class TextDecoder(Protocol):
    """What the detokenizer needs of a tokenizer: implemented by `tokenizers.Tokenizer` (`.backend_tokenizer` in
    transformers).
    """

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...


class TokenKind(Enum):
    """SILENT: unknown to the tokenizer. SPECIAL: skipped on demand. BYTE: a byte-fallback token from 0x80 up."""

    TEXT = auto()
    SILENT = auto()
    SPECIAL = auto()
    BYTE = auto()


class TokenTexts:
    """Shared by all detokenizers of one tokenizer. It learns the kind of a token from the tokenizer, once per token."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._kinds: dict[int, TokenKind] = {}
        letter = decoder.token_to_id("<0x41>")
        falls_back = letter is not None and decoder.decode([letter]) == "A"
        self.byte_anchor = letter if falls_back else None
        """A token that decodes to one letter, used in place of earlier bytes; None without byte fallback."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of all of them, special tokens included."""
        return self._decoder.decode(token_ids, skip_special_tokens=False)

    def kind(self, token_id: int) -> TokenKind:
        kind = self._kinds.get(token_id)
        if kind is None:
            kind = self._kinds[token_id] = self._classify(token_id)
        return kind

    def byte(self, token_id: int) -> bytes:
        """The byte of a `BYTE` token."""
        return bytes.fromhex((self._decoder.id_to_token(token_id) or "")[3:5])

    def _classify(self, token_id: int) -> TokenKind:
        token = self._decoder.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return TokenKind.SILENT
        if self.byte_anchor is not None and _is_high_byte(token):
            return TokenKind.BYTE
        if self.decode([token_id]) and not self._decoder.decode([token_id], skip_special_tokens=True):
            return TokenKind.SPECIAL
        return TokenKind.TEXT


def _is_high_byte(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    try:
        return int(token[3:5], 16) not in _ASCII_BYTES
    except ValueError:
        return False


class Detokenizer:
    """The text of one growing sequence.

    It decodes a short window of the last tokens and returns what the window's text has grown by. The window starts at a
    token that ended on a whole character, so its length, and the cost of a token, does not grow with the sequence.
    `prompt_token_ids` is what the output continues: as in vLLM, a first word then keeps its leading space.
    """

    def __init__(
        self, texts: TokenTexts, skip_special_tokens: bool = True, prompt_token_ids: list[int] | None = None
    ) -> None:
        self._texts = texts
        self._skips_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._take_context(prompt_token_ids or [])

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain; empty while a character is incomplete."""
        kind = self._texts.kind(token_id)
        if kind is TokenKind.BYTE:
            return self._push_byte(token_id)
        if kind is TokenKind.SILENT or (kind is TokenKind.SPECIAL and self._skips_special_tokens):
            return ""
        # An unfinished run of byte tokens ends here: its incomplete characters stay so.
        broken = self._bytes.decode(b"", final=True)
        self._window.append(token_id)
        return broken + self._read_window()

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence; an incomplete character becomes U+FFFD."""
        rest = self._texts.decode(self._window)[self._emitted :] + self._bytes.decode(b"", final=True)
        self._start_window([])
        return rest

    def _push_byte(self, token_id: int) -> str:
        rest = self._texts.decode(self._window)[self._emitted :] if self._window else ""
        anchor = self._texts.byte_anchor
        self._start_window([] if anchor is None else [anchor])
        return rest + self._bytes.decode(self._texts.byte(token_id))

    def _read_window(self) -> str:
        text = self._texts.decode(self._window)
        # Only the last character can still change: a lossy decoder writes one U+FFFD for a character cut short.
        certain = len(text) - text.endswith(REPLACEMENT)
        fresh = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if len(self._window) > _WINDOW:
            self._shorten(text)
        return fresh

    def _shorten(self, text: str) -> None:
        """Restart the window at a late token before which a character ends."""
        if not text.endswith(REPLACEMENT):
            self._start_window(self._window[-1:])
            return
        for start in range(len(self._window) - 1, len(self._window) - 1 - _LONGEST_CHARACTER, -1):
            tail = self._window[start:]
            # A cut within a character, or within its valid beginning, decodes to two or more U+FFFD.
            if self._texts.decode(self._window[:start]) + self._texts.decode(tail) == text:
                self._window = tail
                self._emitted = len(self._texts.decode(tail)) - 1
                return

    def _start_window(self, token_ids: list[int]) -> None:
        """Make these tokens, already returned as text, the context of later ones."""
        self._window = token_ids
        self._emitted = len(self._texts.decode(token_ids)) if token_ids else 0

    def _take_context(self, prompt_token_ids: list[int]) -> None:
        for token_id in reversed(prompt_token_ids[-_CONTEXT_SEARCH:]):
            is_text = self._texts.kind(token_id) is TokenKind.TEXT
            if is_text and not self._texts.decode([token_id]).endswith(REPLACEMENT):
                self._start_window([token_id])
                return
