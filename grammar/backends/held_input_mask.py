"""`TokenMask` of an answer with strings that have grammars of their own: the inputs of custom tools, written as JSON strings.

Invariant: inside such a string a token is allowed by the answer's mask and, by what it means there, by the grammar of the input. The
string begins and ends between two tokens. A string counts as an input by the text before it. In styles without a marker of calls a value
that spells a whole call is held, too.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Self, TypeAlias

import torch
from torch import Tensor

from loraplex.grammar.backends.escaped_vocabulary import EscapedVocabulary
from loraplex.grammar.backends.llguidance_mask import LlguidanceMask
from loraplex.grammar.backends.replayed_mask import AnswerMask, ReplayedMask

MAX_BORDER: Final = 16
"""Bytes before a string that one token may have together with its beginning."""

Inputs: TypeAlias = Sequence[tuple[bytes, Callable[[], LlguidanceMask]]]
"""The text before each string, and what makes the mask of its grammar."""


class InputTokens:
    """The tokens of one vocabulary around and inside inputs, with what they mean there."""

    def __init__(self, vocabulary: EscapedVocabulary) -> None:
        self.vocabulary = vocabulary
        self.plain = vocabulary.plain
        # Of the few texts that end all heads of a style, whatever the names of the tools.
        self.crossing = lru_cache(8 * MAX_BORDER)(self._crossing)
        own = self.plain.bitmask_words * 32
        self.repeated = {token: first for token, first in vocabulary.same.items() if token < own}
        _ = vocabulary.token_bytes, vocabulary.closing, vocabulary.escape_tokens

    def _crossing(self, rest: bytes) -> Tensor:
        """The tokens that begin with `rest` and go on: int32 [words]."""
        longer = (id for id in self.plain.beginning_with(rest) if len(self.plain.token_bytes[id]) > len(rest))
        return self.vocabulary.bits(longer)


class HeldInputMask(ReplayedMask):
    """One sequence. Used by one thread at a time."""

    closes = False

    def __init__(self, fresh: AnswerMask, inputs: Inputs, tokens: InputTokens) -> None:
        self._inputs, self._tokens = inputs, tokens
        heads = [head for head, _ in inputs]
        self._longest = max(map(len, heads))
        # Looked at first: most tokens end in no part of it.
        shared: bytes = os.path.commonprefix([head[::-1] for head in heads])  # type: ignore[assignment]
        self._ending = shared[::-1][-2 * MAX_BORDER :]
        super().__init__(fresh)

    def _reset(self) -> None:
        super()._reset()
        self._tail = b""
        self._rests: list[bytes] = []
        self._input: LlguidanceMask | None = None
        self._is_escape = False

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write every word of the row of an int32 CPU tensor [rows, words]. Raises what the masks raise."""
        self._answer.fill(bitmask, row)
        target = bitmask[row]
        if self._input is not None:
            target.bitwise_and_(self._allowed(self._input))
        for rest in self._rests:
            target.bitwise_and_(~self._tokens.crossing(rest))

    def _allowed(self, mask: LlguidanceMask) -> Tensor:
        vocabulary = self._tokens.vocabulary
        filled = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
        mask.fill(filled, 0)

        def has(token: int) -> int:
            return int(filled[0, token // 32]) >> (token % 32) & 1

        escapes = {
            token for token, byte in vocabulary.escape_tokens.items() if has(vocabulary.byte_token(byte))
        }
        if self._is_escape:
            return vocabulary.bits(escapes)
        allowed = filled[0, : vocabulary.plain.bitmask_words]
        if repeated := [token for token, first in self._tokens.repeated.items() if has(first)]:
            allowed = allowed | vocabulary.bits(repeated)
        if escapes and vocabulary.backslash is not None:
            allowed = allowed | vocabulary.bits([vocabulary.backslash])
        return allowed | vocabulary.closing if mask.is_complete() else allowed

    def accept(self, token_id: int) -> bool:
        text = self._tokens.plain.token_bytes[token_id]
        if any(len(text) > len(rest) and text.startswith(rest) for rest in self._rests):
            return False
        if self._input is not None and not self._accept_input(self._input, token_id, text):
            return False
        if not self._answer.accept(token_id):
            return False
        self._accepted.append(token_id)
        if self._input is None:
            self._follow(text)
        elif text[:1] == b'"' and not self._is_escape:
            self._input, self._tail = None, b""
        else:
            self._is_escape = text == b"\\" and not self._is_escape
        return True

    def _follow(self, text: bytes) -> None:
        """Look for the beginning of an input in the answer's text, and for what is left to write of one that is near."""
        self._tail = (self._tail + text)[-self._longest :]
        begun = None
        if self._tail.endswith(self._ending):
            begun = next((start for head, start in self._inputs if self._tail.endswith(head)), None)
        self._input = begun() if begun else None
        near = range(1, min(MAX_BORDER, len(self._ending) - 1) + 1)
        lefts = [left for left in near if self._tail.endswith(self._ending[:-left])]
        self._rests = [
            self._ending[-left:]
            for left in lefts
            if any(self._tail.endswith(head[:-left]) for head, _ in self._inputs)
        ]

    def _accept_input(self, mask: LlguidanceMask, token_id: int, text: bytes) -> bool:
        vocabulary = self._tokens.vocabulary
        if self._is_escape:
            byte = vocabulary.escape_tokens.get(token_id)
            return byte is not None and mask.accept(vocabulary.byte_token(byte))
        if text[:1] == b'"':
            return mask.is_complete()
        first = vocabulary.same.get(token_id, token_id)
        return token_id == vocabulary.backslash or (
            bool(vocabulary.token_bytes[first]) and mask.accept(first)
        )

    def fork(self) -> Self:
        same = super().fork()
        same._input = None if self._input is None else self._input.fork()
        return same

    def is_complete(self) -> bool:
        return self._answer.is_complete()

    def is_final(self) -> bool:
        return self._answer.is_final()

    def forced_tokens(self) -> Sequence[int]:
        return self._answer.forced_tokens() if self._input is None else ()

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return None

    @property
    def family(self) -> object:
        return (self._input or self._answer).family
