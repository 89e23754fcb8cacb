"""Forced close: finds a short path from any grammar state to the end of a whole document by search.

Invariant: a returned path was accepted token by token by a copy of the mask, which then was complete.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex.grammar.backends.vocabulary import Vocabulary

Words: TypeAlias = npt.NDArray[np.uint32]
Uses: TypeAlias = npt.NDArray[np.int32]

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MARKS = "@-:._/+,;=!?()[]{}<>|'#$%&*^`~ "

STRUCTURE = (
    "}])," + DIGITS + "\"ntf[{:;>-abcdeghijklmopqrsuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_/=.+<(|'!?#$%&*@^`~\\ "
)
"""Between values: end what is open, continue only if that is not allowed, and choose the value with the shortest text."""
AFTER_MARK = '"' + DIGITS + LETTERS + MARKS + "\\"
"""Inside a string: end it, or write something until it may end."""
AFTER_LETTER = '"' + MARKS + DIGITS + LETTERS + "\\"
"""The same after a letter or digit: a pattern of several words needs what stands between them."""
LETTERS_FIRST = '"' + MARKS + LETTERS + DIGITS + "\\"
ONLY_IN_CONTENT = "abcdghijklmopqsvwxyzABCDGHIJKLMNOPQRSTUVWXYZ_"
"""Letters that, given a choice, never begin or continue a number, `true`, `false` or `null`."""

LETTERS_PER_TOKEN = 4
"""The search uses single letters; its path may be this many times longer before it is spelled in whole tokens."""
MAX_STEPS = 1024
"""In letters; longer paths are not searched."""
MAX_SECONDS = 0.05
"""CPU time of one search, since a decoding step waits for it. An ordinary search takes 1 to 3 ms."""


class ClosableMask(Protocol):
    """The part of a `TokenMask` that the search uses; `certain_tokens` spell what must follow, in any tokenization."""

    def fill(self, bitmask: Tensor, row: int) -> None: ...

    def accept(self, token_id: int) -> bool: ...

    def fork(self) -> Self: ...

    def is_complete(self) -> bool: ...

    def certain_tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class _Policy:
    """A preference among the allowed characters that cannot end yet. `weight`: places that a letter loses per use."""

    after_mark: Words
    after_letter: Words
    weight: int


class CloseFinder:
    """Token orders of one vocabulary, computed once. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        letters = _single_letters(vocabulary.encoded_tokens)
        self._tokenizer = vocabulary.text_tokenizer
        self._words = vocabulary.bitmask_words
        self._structure = _ids(letters, STRUCTURE)
        self._policies = (
            _Policy(_ids(letters, AFTER_MARK), _ids(letters, AFTER_LETTER), 8),
            _Policy(_ids(letters, LETTERS_FIRST), _ids(letters, LETTERS_FIRST), 1_000),
        )
        self._only_in_content = _ids(letters, ONLY_IN_CONTENT)
        self._brackets = _ids(letters, "]}")
        self._alphanumeric = frozenset(_ids(letters, DIGITS + LETTERS).tolist())
        self._digits = frozenset(_ids(letters, DIGITS).tolist())
        self._quote = letters.get('"', -1)
        self._by_length = _tokens_by_length(vocabulary)

    def find(self, mask: ClosableMask, most: int) -> list[int] | None:
        """Return at most `most` tokens to a whole document, or None. `mask` does not advance."""
        deadline = time.thread_time() + MAX_SECONDS
        for policy in self._policies:
            path = self._walk(mask, min(LETTERS_PER_TOKEN * most, MAX_STEPS), policy, deadline)
            spelled = path if path is None else self._spelled(mask, path)
            if spelled is not None and len(spelled) <= most:
                return spelled
        return None

    def _walk(self, mask: ClosableMask, most: int, policy: _Policy, deadline: float) -> list[int] | None:
        walker = mask.fork()
        bitmask = torch.empty((1, self._words), dtype=torch.int32)
        words: Words = bitmask.numpy()[0].view(np.uint32)
        uses = np.zeros(self._words * 32, dtype=np.int32)
        path: list[int] = []
        while not walker.is_complete():
            step = walker.certain_tokens()
            if not step:
                walker.fill(bitmask, 0)
                step = self._choice(words, path[-1] if path else -1, uses, policy)
            path.extend(step)
            if not step or len(path) > most or not all(map(walker.accept, step)):
                return None
            if time.thread_time() > deadline:
                return None
        return path

    def _choice(self, words: Words, before: int, uses: Uses, policy: _Policy) -> Sequence[int]:
        """Return the best allowed tokens, empty if none is allowed. Letters used before in a value rank lower."""
        in_content = self._in_content(words)
        content = policy.after_letter if before in self._alphanumeric else policy.after_mark
        for order in (content if in_content else self._structure, self._by_length):
            allowed = np.flatnonzero(_allowed(words, order))
            if len(allowed):
                token = int(order[allowed[(allowed + policy.weight * uses[order[allowed]]).argmin()]])
                if token in self._digits or (in_content and token != self._quote):
                    uses[token] += 1
                else:
                    uses[:] = 0
                return (token,)
        return ()

    def _in_content(self, words: Words) -> bool:
        """Return whether this is inside a string: of a document's structure at most one bracket can be next."""
        if _allowed(words, self._only_in_content).any():
            return True
        return len(self._brackets) == 2 and bool(_allowed(words, self._brackets).all())

    def _spelled(self, mask: ClosableMask, path: list[int]) -> list[int]:
        """Return the same text in the usual tokens, if those are fewer and the grammar accepts them."""
        text = self._tokenizer.decode(path, skip_special_tokens=False)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) >= len(path):
            return path
        walker = mask.fork()
        return tokens if all(map(walker.accept, tokens)) and walker.is_complete() else path


def _allowed(words: Words, token_ids: Words) -> Words:
    """Return 1 where the token is allowed: [tokens]."""
    allowed: Words = (words[token_ids >> 5] >> (token_ids & 31)) & 1
    return allowed


def _single_letters(texts: Sequence[str]) -> dict[str, int]:
    """Return token ids by their one printable ASCII letter; a space has either of two spellings."""
    by_text = {text: token_id for token_id, text in enumerate(texts) if len(text) == 1}
    space = by_text.get("Ġ", by_text.get("▁"))
    return by_text if space is None else {**by_text, " ": space}


def _ids(letters: dict[str, int], order: str) -> Words:
    return np.array([letters[letter] for letter in order if letter in letters], dtype=np.uint32)


def _tokens_by_length(vocabulary: Vocabulary) -> Words:
    """Return all tokens that do not end the output, the shortest first."""
    ends = vocabulary.end_token_ids
    texts = enumerate(vocabulary.encoded_tokens)
    ranked = sorted((len(text), token_id) for token_id, text in texts if text and token_id not in ends)
    return np.array([token_id for _, token_id in ranked], dtype=np.uint32)
