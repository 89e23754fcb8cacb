"""Random texts out of a grammar: what it lets through, not what we think of trying."""

import random
from collections.abc import Iterator

import torch

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import JsonValue

USUAL = frozenset('"]},:{[\\u0123456789-.eEabcdxyz ')
CLOSING = frozenset('"]},')
MAX_TOKENS = 160


class DeadEnd(AssertionError):
    """The grammar led to a place from where no document can be finished."""


class Walks:
    """Walks through grammars over a vocabulary of bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = MaskCompiler(vocabulary)
        self._end = next(iter(vocabulary.end_token_ids))
        self._texts = {
            vocabulary.tokenizer.encode(letter).ids[0]: letter for letter in map(chr, range(32, 127))
        }
        self._tokenizer = vocabulary.tokenizer
        self._words = vocabulary.bitmask_words
        self._size = vocabulary.vocab_size

    def start(self, schema: JsonSchemaValue, backend: Backend) -> AnswerMask:
        """Raises `GrammarInvalid`."""
        emit = emit_llguidance.emit if backend == "llguidance" else emit_xgrammar.emit
        source = emit(JsonValue(schema, "compact" if backend == "llguidance" else "flexible"))
        return self._compiler.compile(b"", encode_spec(GrammarSpec(backend=backend, source=source)))

    def accepts(self, start: AnswerMask, text: str) -> bool:
        """Whether exactly this text goes through to the end."""
        mask = start.fork()
        return all(mask.accept(token) for token in self._tokenizer.encode(text).ids) and mask.is_complete()

    def texts(self, start: AnswerMask, count: int, seed: int) -> Iterator[str]:
        """Whole documents; walks that grow too long are given up. Raises `DeadEnd`."""
        source = random.Random(seed)
        for _ in range(count):
            tokens = self._walk(start, source)
            if tokens is not None:
                yield self._tokenizer.decode(tokens)

    def _walk(self, start: AnswerMask, source: random.Random) -> list[int] | None:
        mask, tokens = start.fork(), list[int]()
        for _ in range(MAX_TOKENS):
            allowed = self._allowed(mask)
            if self._end in allowed:
                if not mask.is_complete():
                    raise DeadEnd(self._tokenizer.decode(tokens))
                if len(allowed) == 1 or source.random() < 0.3:
                    return tokens
                allowed.remove(self._end)
            if not allowed:
                raise DeadEnd(self._tokenizer.decode(tokens))
            token = self._choice(allowed, len(tokens), source)
            mask.accept(token)
            tokens.append(token)
        return None

    def _allowed(self, mask: AnswerMask) -> list[int]:
        bitmask = torch.zeros((1, self._words), dtype=torch.int32)
        mask.fill(bitmask, 0)
        words = bitmask[0].tolist()
        return [token for token in range(self._size) if words[token >> 5] >> (token & 31) & 1]

    def _choice(self, allowed: list[int], length: int, source: random.Random) -> int:
        usual = [token for token in allowed if self._texts.get(token, "\0") in USUAL]
        closing = [token for token in usual if self._texts[token] in CLOSING]
        if length > 60 and closing and source.random() < 0.7:
            return source.choice(closing)
        return source.choice(usual if usual and source.random() < 0.85 else allowed)
