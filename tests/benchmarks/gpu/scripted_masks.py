"""Masks without a grammar: half of the vocabulary at every token, and now and then tokens that must follow."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from loraplex.engine.token_mask import TokenMaskFactory

MASKED, FORCED = b"masked", b"masked, with forced tokens"
FORCED_EVERY, FORCED_TOKENS = 8, 4
"""After so many tokens of its own a row is forced to take some."""
FIRST_TOKEN = 2
"""Those before it end responses."""


class HalfMask:
    """Every second token is allowed, the same ones in every step; only tokens that end a response never are."""

    def __init__(self, words: Tensor, *, forces: bool, count: int = 0) -> None:
        self._words, self._forces, self._count = words, forces, count

    def fill(self, bitmask: Tensor, row: int) -> None:
        bitmask[row].copy_(self._words)

    def accept(self, token_id: int) -> bool:
        self._count += 1
        return True

    def rollback(self, count: int) -> None:
        self._count -= count

    def fork(self) -> Self:
        return type(self)(self._words, forces=self._forces, count=self._count)

    def is_complete(self) -> bool:
        return False

    def is_final(self) -> bool:
        return False

    def forced_tokens(self) -> Sequence[int]:
        place = self._count % (FORCED_EVERY + FORCED_TOKENS) - FORCED_EVERY
        return [FIRST_TOKEN] * (FORCED_TOKENS - place) if self._forces and place >= 0 else []

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return None

    @property
    def family(self) -> object:
        return self

    @property
    def closes(self) -> bool:
        return False


def scripted_masks(vocab_size: int) -> TokenMaskFactory:
    """The factory for requests whose grammar is `MASKED` or `FORCED`."""
    words = torch.full((-(-vocab_size // 32),), 0x55555554, dtype=torch.int32)
    return lambda namespace, grammar: HalfMask(words, forces=grammar == FORCED)
