"""`TokenMask` by llguidance: an Earley parser over lexemes that compiles in milliseconds and keeps control tokens out of texts.

Invariant: every limit is a count of work, so that a hostile grammar fails with a message and never hangs.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from loraplex.grammar.closing import Closer
from loraplex.grammar.emit_llguidance import CONTROL_TOKENS
from loraplex.grammar.errors import GrammarInvalid, MatcherFailed
from loraplex.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

BYTES_PER_SOURCE_BYTE = 64
"""What a compiled grammar holds, for each byte of its source: an estimate, the library tells no size."""
BYTES_AT_LEAST = 65_536


@dataclass(frozen=True, slots=True)
class LlguidanceLimits:
    """Work in the library's units. 50k lexer fuel to build, 14k to step and 20k parser items take about a millisecond each."""

    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_items_in_row: int = 2_000
    max_lexer_states: int = 50_000
    max_grammar_size: int = 500_000

    def parser_limits(self) -> LLParserLimits:
        return LLParserLimits(
            max_items_in_row=self.max_items_in_row,
            initial_lexer_fuel=self.initial_lexer_fuel,
            step_lexer_fuel=self.step_lexer_fuel,
            step_max_items=self.step_max_items,
            max_lexer_states=self.max_lexer_states,
            max_grammar_size=self.max_grammar_size,
            verbose_errors=False,
        )


class LlguidanceMask:
    """One sequence under one grammar. Used by one thread at a time."""

    __slots__ = ("_closer", "_closes", "_fast_forward", "_matcher", "_words")

    def __init__(
        self, matcher: LLMatcher, words: int, closer: Closer, *, fast_forward: bool, closes: bool
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._closer = closer
        self._fast_forward = fast_forward
        self._closes = closes

    def fill(self, bitmask: "Tensor", row: int) -> None:
        """Writes every word of the row of an int32 CPU tensor [rows, words]. Raises `MatcherFailed`."""
        rows, words = bitmask.shape
        if words != self._words or not 0 <= row < rows:
            raise ValueError(f"row {row} of [{rows}, {words}]: the bitmask must have {self._words} words")
        address = bitmask.data_ptr() + row * bitmask.stride(0) * 4
        self._matcher.unsafe_compute_mask_ptr(address, words * 4)
        if self._matcher.is_error():
            raise self._failure()

    def accept(self, token_id: int) -> bool:
        consumed = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if not consumed and self._matcher.is_error():
            raise self._failure()
        return consumed

    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise self._failure()

    def fork(self) -> Self:
        return type(self)(
            self._matcher.deep_copy(),
            self._words,
            self._closer,
            fast_forward=self._fast_forward,
            closes=self._closes,
        )

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_final(self) -> bool:
        return bool(self._matcher.is_accepting() and self._matcher.is_stopped())

    def forced_tokens(self) -> Sequence[int]:
        return self.certain_tokens() if self._fast_forward else ()

    def certain_tokens(self) -> Sequence[int]:
        """Tokens without an alternative, whether or not the request wants to skip over them."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return self._closer.find(self, most) if self._closes else None

    @property
    def closes(self) -> bool:
        return self._closes

    def _failure(self) -> MatcherFailed:
        return MatcherFailed(str(self._matcher.get_error()) or "the matcher cannot undo so many tokens")


class CompiledLlguidance:
    """A grammar at its start, from which masks are made."""

    def __init__(self, start: LLMatcher, words: int, source: str) -> None:
        self._start = start
        self._words = words
        self.size_bytes = BYTES_AT_LEAST + BYTES_PER_SOURCE_BYTE * len(source)

    def mask(self, closer: Closer, *, fast_forward: bool, closes: bool) -> LlguidanceMask:
        return LlguidanceMask(
            self._start.deep_copy(), self._words, closer, fast_forward=fast_forward, closes=closes
        )


class LlguidanceCompiler:
    """Compiles for one vocabulary; safe to use from several threads. `tokenizer` is the vocabulary as the library holds it."""

    def __init__(self, vocabulary: Vocabulary, limits: LlguidanceLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits.parser_limits()
        self.tokenizer = LLTokenizer(
            vocabulary.tokenizer_json,
            n_vocab=vocabulary.vocab_size,
            eos_token=sorted(vocabulary.end_token_ids),
        )

    def compile(self, source: str) -> CompiledLlguidance:
        """`source` is what `emit_llguidance.py` makes. Raises `GrammarInvalid`."""
        grammar = source + self._control_tokens(source)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarInvalid(str(matcher.get_error()))
        return CompiledLlguidance(matcher, self._vocabulary.bitmask_words, source)

    def _control_tokens(self, source: str) -> str:
        """Rules for the control tokens that the first line lists."""
        header = source.partition("\n")[0]
        if not header.startswith(CONTROL_TOKENS):
            raise GrammarInvalid("the grammar does not begin with the list of its control tokens")
        texts = json.loads(header.removeprefix(CONTROL_TOKENS))
        return "".join(
            f"\ncontrol_token_{index}: <[{self._vocabulary.token_id(text)}]>"
            for index, text in enumerate(texts)
        )
