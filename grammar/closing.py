"""Guaranteed close: a short way from any state of a grammar to the end of a whole document, found by trying.

Invariant: what is returned was accepted token by token by a copy of the mask, which then was complete.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt

from loraplex.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

STRUCTURE = "}]),0123456789\"ntf[{:;>-abcdeghijklmopqrsuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_/=.+<(|'!?#$%&*@^`~\\"
"""Between values: end what is open, go on only if that is not allowed, and take the value with the shortest text."""
CONTENT = "\"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.:/@+,;=!?()[]{}<>|'#$%&*^`~\\"
"""Inside a string: end it, or write something plain until it may end."""
ONLY_IN_CONTENT = "abcdghijklmopqsvwxyzABCDGHIJKLMNOPQRSTUVWXYZ_"
"""Letters that never begin or continue a number, `true`, `false` or `null` where there is a choice."""


class ClosableMask(Protocol):
    """What of a `TokenMask` the search uses."""

    def fill(self, bitmask: "Tensor", row: int) -> None: ...

    def accept(self, token_id: int) -> bool: ...

    def fork(self) -> Self: ...

    def is_complete(self) -> bool: ...

    def certain_tokens(self) -> Sequence[int]: ...


class Closer:
    """Ranks of one vocabulary's tokens, computed once. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        letters = {
            text: token_id for token_id, text in enumerate(vocabulary.encoded_tokens) if len(text) == 1
        }
        self._words = vocabulary.bitmask_words
        self._structure = _ids(letters, STRUCTURE)
        self._content = _ids(letters, CONTENT)
        self._only_in_content = _ids(letters, ONLY_IN_CONTENT)
        self._brackets = _ids(letters, "]}")
        self._by_length = _tokens_by_length(vocabulary)

    def find(self, mask: ClosableMask, most: int) -> list[int] | None:
        """At most `most` tokens to a whole document, or None. `mask` does not advance."""
        walker = mask.fork()
        bitmask = _bitmask(self._words)
        bits: npt.NDArray[np.uint32] = bitmask.numpy()[0].view(np.uint32)
        path: list[int] = []
        while not walker.is_complete():
            step = walker.certain_tokens() or self._choose(walker, bitmask, bits)
            path.extend(step)
            if not step or len(path) > most or not all(map(walker.accept, step)):
                return None
        return path

    def _choose(self, walker: ClosableMask, bitmask: "Tensor", bits: npt.NDArray[np.uint32]) -> Sequence[int]:
        walker.fill(bitmask, 0)
        in_content = bool(_allowed(bits, self._only_in_content).any()) or (
            len(self._brackets) == 2 and bool(_allowed(bits, self._brackets).all())
        )
        for ranked in (self._content if in_content else self._structure, self._by_length):
            allowed = _allowed(bits, ranked)
            best = int(allowed.argmax()) if len(ranked) else 0
            if len(ranked) and allowed[best]:
                return (int(ranked[best]),)
        return ()


def _allowed(bits: npt.NDArray[np.uint32], token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """1 where the token is allowed: [tokens]."""
    allowed: npt.NDArray[np.uint32] = (bits[token_ids >> 5] >> (token_ids & 31)) & 1
    return allowed


def _bitmask(words: int) -> "Tensor":
    import torch

    return torch.empty((1, words), dtype=torch.int32)


def _ids(letters: dict[str, int], order: str) -> npt.NDArray[np.uint32]:
    return np.array([letters[letter] for letter in order if letter in letters], dtype=np.uint32)


def _tokens_by_length(vocabulary: Vocabulary) -> npt.NDArray[np.uint32]:
    """Every ordinary token, the shortest first."""
    skipped = vocabulary.end_token_ids | set(vocabulary.special_tokens.values())
    texts = vocabulary.encoded_tokens
    ranked = sorted(
        (len(text), token_id) for token_id, text in enumerate(texts) if text and token_id not in skipped
    )
    return np.array([token_id for _, token_id in ranked], dtype=np.uint32)
