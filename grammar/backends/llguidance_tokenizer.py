"""Converts a vocabulary to llguidance's tokenizer.

Invariant: control tokens are those of the tokenizer, and text that looks like one is spelled in ordinary tokens. The
library itself takes every added `<…>` for a control token.
"""

from collections.abc import Sequence

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from loraplex.grammar.backends.vocabulary import Vocabulary


class _Speller:
    """The tokenizer interface that the library needs: bytes by id, control tokens, and the ids of a text."""

    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = min(vocabulary.end_token_ids)
        self.special_token_ids = sorted({*vocabulary.special_tokens.values(), *vocabulary.end_token_ids})
        self._spelled = vocabulary.spelled

    def __call__(self, text: str) -> list[int]:
        return self._spelled(text)


def llguidance_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Build the tokenizer; takes about a second for 50k tokens. Safe to use from several threads."""
    return LLTokenizer(
        TokenizerWrapper(_Speller(vocabulary, vocabulary.token_bytes)),
        n_vocab=vocabulary.vocab_size,
        eos_token=sorted(vocabulary.end_token_ids),
    )
