"""The tokens of a vocabulary as what they mean inside a JSON string (RFC 8259, section 7): `\\n` in a token is a line break.

Invariant: a token whose text is not a whole part of a string, such as one with the closing quote, means nothing. A backslash of its
own is written with a second token; for these there is a token of each byte behind the vocabulary's own. Of tokens that mean the same,
the first stands for all, since the library knows one token of a text.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Final

from torch import Tensor

from loraplex.grammar.backends.bitmask import bits_of
from loraplex.grammar.backends.vocabulary import Vocabulary

ESCAPES: Final = {ord(letter): ord(byte) for letter, byte in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)}
_ESCAPE: Final = re.compile(rb'\\(?:(["\\/bfnrt])|u([0-9a-fA-F]{4}))')
_NOT_A_PART: Final = re.compile(rb'["\\\x00-\x1f]')


class EscapedVocabulary(Vocabulary):
    """The tokens of `plain` by their meanings, then one for each byte. A row of its masks begins with the words of `plain`."""

    def __init__(self, plain: Vocabulary) -> None:
        super().__init__(plain.tokenizer_json, plain.bitmask_words * 32 + 256, plain.end_token_ids)
        object.__setattr__(self, "plain", plain)

    plain: Vocabulary

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        same = self.same
        return tuple(b"" if token in same else text for token, text in enumerate(self._meanings))

    @cached_property
    def same(self) -> dict[int, int]:
        """The tokens that mean what an earlier one means -> that one."""
        firsts: dict[bytes, int] = {}
        first_of = (
            (token, firsts.setdefault(text, token)) for token, text in enumerate(self._meanings) if text
        )
        return {token: first for token, first in first_of if token != first}

    @cached_property
    def _meanings(self) -> tuple[bytes, ...]:
        controls = set(self.special_tokens.values())
        texts = enumerate(self.plain.token_bytes)
        meanings = [b"" if token in controls else unescaped(text) or b"" for token, text in texts]
        padding = [b""] * (self.plain.bitmask_words * 32 - len(meanings))
        return (*meanings, *padding, *(bytes([byte]) for byte in range(256)))

    def spelled(self, text: str) -> list[int]:
        return [self.byte_token(byte) for byte in text.encode()]

    def byte_token(self, byte: int) -> int:
        """Return the token that means this byte."""
        own = self.plain.bitmask_words * 32 + byte
        return self.same.get(own, own)

    @cached_property
    def backslash(self) -> int | None:
        """The token that is one backslash."""
        texts = enumerate(self.plain.token_bytes)
        return next((token for token, text in texts if text == b"\\"), None)

    @cached_property
    def escape_tokens(self) -> dict[int, int]:
        """Tokens of one letter -> the byte that they mean behind a backslash."""
        texts = enumerate(self.plain.token_bytes)
        return {token: ESCAPES[text[0]] for token, text in texts if len(text) == 1 and text[0] in ESCAPES}

    @cached_property
    def closing(self) -> Tensor:
        """The tokens that begin with the closing quote: int32 [words of `plain`]."""
        return self.bits(token for token, text in enumerate(self.plain.token_bytes) if text[:1] == b'"')

    def bits(self, tokens: Iterable[int]) -> Tensor:
        """Return the bitmask of tokens of `plain`: int32 [words of `plain`]."""
        return bits_of(tokens, self.plain.bitmask_words)


def unescaped(text: bytes) -> bytes | None:
    """Return what a part of a JSON string means; None for what is not a whole part of one."""
    if _NOT_A_PART.search(_ESCAPE.sub(b"", text)):
        return None
    try:
        return _ESCAPE.sub(_meaning, text)
    except UnicodeEncodeError:
        # Half of a surrogate pair.
        return None


def _meaning(escape: re.Match[bytes]) -> bytes:
    return bytes([ESCAPES[escape[1][0]]]) if escape[1] else chr(int(escape[2], 16)).encode()
