"""`TokenMask` by llguidance: an Earley parser over lexemes that compiles in milliseconds and keeps control tokens out
of texts.

Invariant: each limit counts work, so a hostile grammar fails with a message and never hangs.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from loraplex.grammar.backends.bitmask import bits_of
from loraplex.grammar.backends.emit_llguidance import CONTROL_TOKENS
from loraplex.grammar.backends.forced_close import CloseFinder
from loraplex.grammar.backends.llguidance_tokenizer import llguidance_tokenizer
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.errors import GrammarInvalid, MatcherFailed, MatcherTooCostly

WORK_SPENT = ("ParserTooComplex", "LexerTooComplex")
EXPRESSIONS_SPENT = "too many expressions"
"""A limit of the library's regular expressions, which it reports as an error like any other."""

NOTHING_CAN_FOLLOW = "NoExtensionBias"
"""The library's name of that limit in its errors."""

QUOTED_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
OUR_PLACE = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema|invalid regex)")

TOKEN_OR_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s]+>)', re.DOTALL)
"""Lark tokens: a string, a comment, a regular expression, or, in the one group, a token name."""

BYTES_PER_SOURCE_BYTE = 64
"""Estimated memory of a compiled grammar per byte of its source; the library reports no size."""
BYTES_AT_LEAST = 65_536


@dataclass(frozen=True, slots=True)
class LlguidanceLimits:
    """Work in the library's units. 50k lexer fuel to build, 14k to step and 20k parser items take about a millisecond
    each.
    """

    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 200_000
    max_items_in_row: int = 20_000
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
    """One sequence under one grammar. Used by one thread at a time.

    The end token is counted here: the library counts it only where more text could follow.
    """

    __slots__ = ("_closer", "_closes", "_compiled", "_ended", "_fast_forward", "_matcher")

    def __init__(
        self,
        matcher: LLMatcher,
        compiled: "CompiledLlguidance",
        closer: CloseFinder,
        *,
        fast_forward: bool,
        closes: bool,
        ended: bool = False,
    ) -> None:
        self._matcher = matcher
        self._compiled = compiled
        self._closer = closer
        self._fast_forward = fast_forward
        self._closes = closes
        self._ended = ended

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write every word of the row of an int32 CPU tensor [rows, words]; zeros where nothing can follow.

        Raises `MatcherFailed`.
        """
        rows, words = bitmask.shape
        if words != len(self._compiled.end) or not 0 <= row < rows:
            raise ValueError(f"row {row} of a bitmask [{rows}, {words}], for {len(self._compiled.end)} words")
        if self._ended:
            bitmask[row].copy_(self._compiled.end)
            return
        self._matcher.unsafe_compute_mask_ptr(bitmask.data_ptr() + row * bitmask.stride(0) * 4, words * 4)
        if self._matcher.is_error():
            if not self._matcher.get_error().startswith(NOTHING_CAN_FOLLOW):
                raise self._failure()
            bitmask[row].zero_()

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._compiled.end_token_ids:
            self._ended = self.is_complete()
            return self._ended
        consumed = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if not consumed and self._matcher.is_error():
            raise self._failure()
        return consumed

    def rollback(self, count: int) -> None:
        if self._ended and count > 0:
            self._ended = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise self._failure()

    def fork(self) -> Self:
        return type(self)(
            self._matcher.deep_copy(),
            self._compiled,
            self._closer,
            fast_forward=self._fast_forward,
            closes=self._closes,
            ended=self._ended,
        )

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_final(self) -> bool:
        return self._ended or bool(self._matcher.is_accepting() and self._matcher.is_stopped())

    def forced_tokens(self) -> Sequence[int]:
        return self.certain_tokens() if self._fast_forward else ()

    def certain_tokens(self) -> Sequence[int]:
        """Return the tokens without an alternative, whether or not the request enables fast-forward."""
        tokens: list[int] = [] if self._ended else self._matcher.compute_ff_tokens()
        return tokens

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return self._closer.find(self, most) if self._closes else None

    @property
    def family(self) -> object:
        """All masks of one compiled grammar share its lexer, behind one lock."""
        return self._compiled

    @property
    def closes(self) -> bool:
        return self._closes

    def _failure(self) -> MatcherFailed:
        message = without_source(self._matcher.get_error()) or "the matcher cannot undo so many tokens"
        spent = self._matcher.stop_reason() in WORK_SPENT or EXPRESSIONS_SPENT in message
        return MatcherTooCostly(message) if spent else MatcherFailed(message)


class CompiledLlguidance:
    """A grammar at its start, from which masks are created. `end` is the bitmask of the end tokens, int32 [words]."""

    def __init__(self, start: LLMatcher, source: str, end_token_ids: frozenset[int], end: Tensor) -> None:
        self._start = start
        self.end_token_ids = end_token_ids
        self.end = end
        self.size_bytes = BYTES_AT_LEAST + BYTES_PER_SOURCE_BYTE * len(source)

    def mask(self, closer: CloseFinder, *, fast_forward: bool, closes: bool) -> LlguidanceMask:
        return LlguidanceMask(self._start.deep_copy(), self, closer, fast_forward=fast_forward, closes=closes)


class LlguidanceCompiler:
    """Compiles for one vocabulary; safe to use from several threads. `tokenizer` is the library's form of the
    vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, limits: LlguidanceLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits.parser_limits()
        self.tokenizer = llguidance_tokenizer(vocabulary)
        self._end = bits_of(vocabulary.end_token_ids, vocabulary.bitmask_words)

    def compile(self, source: str) -> CompiledLlguidance:
        """Compile a source of `emit_llguidance.py`. Raises `GrammarInvalid`."""
        grammar = f"{source}\n{self._control_tokens(source)}"
        self._check_named(source)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarInvalid(without_source(matcher.get_error()))
        return CompiledLlguidance(matcher, source, self._vocabulary.end_token_ids, self._end)

    def _control_tokens(self, source: str) -> str:
        """Return rules for the control tokens that the last line lists."""
        last = source.rpartition("\n")[2]
        if not last.startswith(CONTROL_TOKENS):
            raise GrammarInvalid("the grammar does not end with the list of its control tokens")
        texts = json.loads(last.removeprefix(CONTROL_TOKENS))
        ids = [self._vocabulary.token_id(text) for text in texts]
        if self._vocabulary.end_token_ids.intersection(ids):
            raise GrammarInvalid("a grammar cannot name a token that ends the answer")
        return "\n".join(f"control_token_{index}: <[{token_id}]>" for index, token_id in enumerate(ids))

    def _check_named(self, source: str) -> None:
        """Allow only control tokens named by their text, none of which ends the output; the grammar's end does that."""
        usable = self._vocabulary.special_tokens
        for match in TOKEN_OR_TEXT.finditer(source):
            name = match[1]
            if name is not None and usable.get(name) in (None, *self._vocabulary.end_token_ids):
                raise GrammarInvalid(f"a grammar cannot name the token {name}")


def without_source(message: str) -> str:
    """Return a message of the library without the grammar lines that it quotes."""
    return OUR_PLACE.sub("", QUOTED_LINES.sub("", message)).removesuffix("<non-verbose/>").strip()
