"""`TokenMask` of an answer with strings that have grammars of their own: the inputs of custom tools, written as JSON strings.

Invariant: inside such a string a token is allowed by the answer's mask and, by what it means there, by the grammar of the input. The
string begins and ends between two tokens.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Self

import torch
from torch import Tensor

from loraplex.grammar.backends.escaped_vocabulary import EscapedVocabulary
from loraplex.grammar.backends.llguidance_mask import LlguidanceMask
from loraplex.grammar.backends.thought_mask import AnswerMask

MAX_BORDER: Final = 16
"""Bytes before a string that one token may have together with its beginning."""


class InputTokens:
    """The tokens of one vocabulary around and inside inputs, with what they mean there."""

    def __init__(self, vocabulary: EscapedVocabulary) -> None:
        self.vocabulary = vocabulary
        self.plain = vocabulary.plain
        self.crossing = lru_cache(256)(self._crossing)
        own = self.plain.bitmask_words * 32
        self.repeated = {token: first for token, first in vocabulary.same.items() if token < own}
        _ = vocabulary.token_bytes, vocabulary.closing, vocabulary.escape_tokens

    def _crossing(self, rest: bytes) -> Tensor:
        """The tokens that begin with `rest` and go on: int32 [words]."""
        texts = enumerate(self.plain.token_bytes)
        return self.vocabulary.bits(i for i, text in texts if len(text) > len(rest) and text.startswith(rest))


class HeldInputMask:
    """One sequence. `inputs`: the text before each string, and what makes the mask of its grammar. Used by one thread at a time."""

    closes = False

    def __init__(
        self,
        fresh: AnswerMask,
        inputs: Sequence[tuple[bytes, Callable[[], LlguidanceMask]]],
        tokens: InputTokens,
    ) -> None:
        self._fresh, self._inputs, self._tokens = fresh, inputs, tokens
        self._longest = max(len(head) for head, _ in inputs)
        self._reset()

    def _reset(self) -> None:
        self._answer = self._fresh.fork()
        self._accepted: list[int] = []
        self._tail = b""
        self._input: LlguidanceMask | None = None
        self._is_escape = False

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write every word of the row of an int32 CPU tensor [rows, words]. Raises what the masks raise."""
        self._answer.fill(bitmask, row)
        target = bitmask[row]
        if self._input is None:
            for rest in self._borders():
                target.bitwise_and_(~self._tokens.crossing(rest))
            return
        target.bitwise_and_(self._allowed(self._input))

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
        """Advance by one token; False if it is not allowed."""
        text = self._tokens.plain.token_bytes[token_id]
        if self._input is None:
            if any(len(text) > len(rest) and text.startswith(rest) for rest in self._borders()):
                return False
        elif not self._accept_input(self._input, token_id, text):
            return False
        if not self._answer.accept(token_id):
            return False
        self._accepted.append(token_id)
        if self._input is None:
            self._tail = (self._tail + text)[-self._longest :]
            begun = next((start for head, start in self._inputs if self._tail.endswith(head)), None)
            self._input = begun() if begun else None
        elif text[:1] == b'"' and not self._is_escape:
            self._input, self._tail = None, b""
        else:
            self._is_escape = text == b"\\" and not self._is_escape
        return True

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

    def _borders(self) -> list[bytes]:
        """What is left to write of heads that have begun, where that is short."""
        rests = []
        for head, _ in self._inputs:
            for left in range(1, min(MAX_BORDER, len(head)) + 1):
                if self._tail.endswith(head[:-left]):
                    rests.append(head[-left:])
                    break
        return rests

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens, by taking all others again."""
        kept = self._accepted[: len(self._accepted) - count]
        self._reset()
        for token_id in kept:
            self.accept(token_id)

    def fork(self) -> Self:
        copy = type(self)(self._fresh, self._inputs, self._tokens)
        copy._answer, copy._accepted, copy._tail = self._answer.fork(), list(self._accepted), self._tail
        copy._input = None if self._input is None else self._input.fork()
        copy._is_escape = self._is_escape
        return copy

    def is_complete(self) -> bool:
        return self._answer.is_complete()

    def is_final(self) -> bool:
        return self._answer.is_final()

    def forced_tokens(self) -> Sequence[int]:
        return self._answer.forced_tokens() if self._input is None else ()

    def certain_tokens(self) -> Sequence[int]:
        return self._answer.certain_tokens() if self._input is None else ()

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return None

    @property
    def family(self) -> object:
        return self._fresh.family
