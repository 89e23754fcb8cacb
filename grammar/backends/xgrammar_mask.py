"""`TokenMask` by xgrammar: a pushdown automaton that compiles slower and steps faster, and reads structural tags and
EBNF.

Invariant: control tokens that the grammar does not name are cleared from every mask, since the library allows their
text inside strings.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from llguidance import LLTokenizer
from pydantic import ValidationError
from torch import Tensor
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, StructuralTag, TokenizerInfo
from xgrammar.tokenizer_info import VocabType

from loraplex.grammar.backends.bitmask import bits_of
from loraplex.grammar.backends.forced_close import CloseFinder
from loraplex.grammar.backends.structural_tag import (
    lowered,
    may_force_without_end,
    named_tokens,
    read_structural_tag,
)
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.errors import GrammarInvalid, MatcherFailed

PLACE_IN_SOURCE = re.compile(
    r"^(\[[^\]]*\]\s*)?\S+\.(cc|h|cpp|hpp):\d+:\s*(Check failed: \(.*\) is false: )?"
)
"""The place in the library's C++ source, which tenants must not see."""

QUICK_S = 0.001
"""Maximum CPU time of a mask that may be filled while a decoding step waits."""


@dataclass(frozen=True, slots=True)
class TokenSets:
    """`usable` and `end` are bitmasks, int32 [words]; `blocked` are the control tokens missing in `usable`."""

    usable: Tensor
    end: Tensor
    blocked: frozenset[int]


class XgrammarMask:
    """One sequence under one grammar. Used by one thread at a time."""

    __slots__ = ("_closer", "_closes", "_compiled", "_fast_forward", "_last_fill_s", "_matcher")

    def __init__(
        self,
        matcher: GrammarMatcher,
        compiled: "CompiledXgrammar",
        closer: CloseFinder,
        *,
        fast_forward: bool,
        closes: bool,
    ) -> None:
        self._matcher = matcher
        self._compiled = compiled
        self._closer = closer
        self._fast_forward = fast_forward
        self._closes = closes
        self._last_fill_s = 0.0

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write every word of the row of an int32 CPU tensor [rows, words]. Raises `MatcherFailed`."""
        rows, words = bitmask.shape
        if words != len(self._compiled.tokens.end) or not 0 <= row < rows:
            expected = len(self._compiled.tokens.end)
            raise ValueError(f"row {row} of a bitmask [{rows}, {words}], for {expected} words")
        target = bitmask[row]
        if self._matcher.is_terminated():
            target.copy_(self._compiled.tokens.end)
            return
        began = time.thread_time()
        try:
            self._matcher.fill_next_token_bitmask(bitmask, row)
        except RuntimeError as error:
            raise MatcherFailed(without_place(error)) from error
        self._last_fill_s = time.thread_time() - began
        target.bitwise_and_(self._compiled.tokens.usable)

    def accept(self, token_id: int) -> bool:
        if token_id in self._compiled.tokens.blocked:
            return False
        try:
            return bool(self._matcher.accept_token(token_id))
        except RuntimeError as error:
            raise MatcherFailed(without_place(error)) from error

    def rollback(self, count: int) -> None:
        try:
            self._matcher.rollback(count)
        except RuntimeError as error:
            raise MatcherFailed(without_place(error)) from error

    def fork(self) -> Self:
        return type(self)(
            self._matcher.fork(),
            self._compiled,
            self._closer,
            fast_forward=self._fast_forward,
            closes=self._closes,
        )

    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def is_final(self) -> bool:
        """Return whether nothing but the end can follow; False too where the last mask was slow.

        Only a mask answers this, and the decoding step would wait for it. The end token is then sampled like any
        other.
        """
        if not self._matcher.is_completed() or self._last_fill_s > QUICK_S:
            return False
        end = self._compiled.tokens.end
        bitmask = torch.empty((1, len(end)), dtype=torch.int32)
        self.fill(bitmask, 0)
        return torch.equal(bitmask[0], end)

    def forced_tokens(self) -> Sequence[int]:
        text = self._certain_text() if self._fast_forward else ""
        return self._compiled.surely(text) if text else ()

    def certain_tokens(self) -> Sequence[int]:
        """Return the text without an alternative in some tokenization."""
        text = self._certain_text()
        return self._compiled.spelled(text) if text else ()

    def _certain_text(self) -> str:
        """Return the text that must follow; empty if it begins or ends inside a character of several bytes.

        Empty too where it may be endless: the library would write all of it before it returns.
        """
        if self._compiled.may_force_without_end or self._matcher.is_terminated():
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:
            return ""

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return self._closer.find(self, most) if self._closes else None

    @property
    def family(self) -> object:
        return self

    @property
    def closes(self) -> bool:
        return self._closes


class CompiledXgrammar:
    """A grammar at its start, from which masks are created. It does not grow while they are used."""

    is_outgrown = False

    def __init__(
        self,
        compiled: CompiledGrammar,
        tokens: TokenSets,
        tokenizer: LLTokenizer,
        spelled: Callable[[str], list[int]],
        *,
        may_force_without_end: bool,
    ) -> None:
        self._start = GrammarMatcher(compiled)
        self._tokenizer = tokenizer
        self.spelled = spelled
        self.tokens = tokens
        self.may_force_without_end = may_force_without_end
        self.size_bytes = int(compiled.memory_size_bytes)

    def mask(self, closer: CloseFinder, *, fast_forward: bool, closes: bool) -> XgrammarMask:
        return XgrammarMask(self._start.fork(), self, closer, fast_forward=fast_forward, closes=closes)

    def surely(self, text: str) -> list[int]:
        """Return the tokens that begin the tokenization of every text that begins with `text`."""
        tokens: list[int]
        tokens, _ = self._tokenizer.tokenize_partial(text.encode())
        return tokens


class XgrammarCompiler:
    """Compiles for one vocabulary; safe to use from several threads. `tokenizer` spells forced texts."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        information = TokenizerInfo(
            list(vocabulary.encoded_tokens),
            VocabType[vocabulary.spelling],
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=sorted(vocabulary.end_token_ids),
        )
        self._compiler = GrammarCompiler(information, max_threads=1, cache_enabled=False)
        words, texts = vocabulary.bitmask_words, vocabulary.encoded_tokens
        controls = frozenset(vocabulary.special_tokens.values()) - vocabulary.end_token_ids
        self._end = bits_of(vocabulary.end_token_ids, words)
        self._usable = bits_of(
            (token for token, text in enumerate(texts) if text and token not in controls), words
        )

    def compile(self, source: str) -> CompiledXgrammar:
        """Compile a structural tag in JSON. Raises `GrammarInvalid`."""
        tag = read_structural_tag(source)
        try:
            named = self._ids(named_tokens(tag["format"]))
            checked = StructuralTag.model_validate({**tag, "format": lowered(tag["format"])})
            compiled = self._compiler.compile_structural_tag(checked)
        except (RuntimeError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise GrammarInvalid(without_place(error)) from error
        return CompiledXgrammar(
            compiled,
            self._token_sets(named),
            self._tokenizer,
            self._vocabulary.spelled,
            may_force_without_end=may_force_without_end(tag["format"]),
        )

    def _ids(self, named: Iterable[str | int]) -> frozenset[int]:
        found = {self._vocabulary.token_id(token) for token in named}
        if found & self._vocabulary.end_token_ids:
            raise GrammarInvalid("a grammar cannot name a token that ends the answer")
        return frozenset(found)

    def _token_sets(self, named: frozenset[int]) -> TokenSets:
        vocabulary = self._vocabulary
        blocked = frozenset(vocabulary.special_tokens.values()) - vocabulary.end_token_ids - named
        usable = self._usable | bits_of(named, vocabulary.bitmask_words)
        return TokenSets(usable, self._end, blocked)


def without_place(error: Exception) -> str:
    """Return a library's message about a grammar in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return PLACE_IN_SOURCE.sub("", str(error)).strip()
