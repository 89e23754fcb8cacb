"""`TokenMask` by llguidance: an Earley parser over lexemes that compiles in milliseconds and keeps control tokens out
of texts.

Invariant: each limit counts work, so a hostile grammar fails with a message and never hangs. A lexer, which grows while
masks are filled, is only a cache: a mask can continue on a new build of its grammar.
"""

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self
from weakref import ref

import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from loraplex.grammar.backends.bitmask import bits_of
from loraplex.grammar.backends.emit_llguidance import CONTROL_TOKENS
from loraplex.grammar.backends.forced_close import CloseFinder
from loraplex.grammar.backends.llguidance_tokenizer import llguidance_tokenizer
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.errors import GrammarInvalid, MatcherFailed, MatcherTooCostly

WORK_SPENT = ("ParserTooComplex", "LexerTooComplex")
LEXER_SPENT = "lexer error: "
"""The start of errors of a lexer with too many states or expressions. All masks of the grammar share it, and get them too."""

NOTHING_CAN_FOLLOW = "NoExtensionBias"
"""The library's name of that limit in its errors."""

QUOTED_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
OUR_PLACE = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema|invalid regex)")

TOKEN_OR_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s]+>)', re.DOTALL)
"""Lark tokens: a string, a comment, a regular expression, or, in the one group, a token name."""

BYTES_PER_SOURCE_BYTE = 128
"""Estimated memory of a compiled grammar per byte of its source; the library reports no size."""
BYTES_AT_LEAST = 65_536

GROWTH_PER_MASK = 8 << 10
"""Estimated growth of a lexer by a mask of up to `WARM_S`; measured: 7 KB where few tokens are allowed."""
WARM_S = 0.0002
"""CPU time of usual masks: 10 to 150 us at 49k tokens. Slower ones count by their time."""
GROWTH_BYTES_PER_S = 600 << 20
"""Estimated growth of a lexer per second of CPU time in slower masks; measured: 100 to 335 MB by grammar on one core."""
MAX_GROWTH_BYTES = 40 << 20
"""Upper bound of the estimate: 16,384 states of at most 2.3 KB."""
REPORT_BYTES = 128 << 10
"""Estimated growth between two reports to the grammar's owner."""

QUICK_BUILD_S = 0.05
"""CPU time of a build that a mask may wait for: usual schemas take 1 to 5 ms, 128 tools 400 ms."""


@dataclass(frozen=True, slots=True)
class LlguidanceLimits:
    """Work in the library's units. 50k lexer fuel to build, 14k to step and 20k parser items take about a millisecond
    each. A lexer state takes 0.3 to 2.3 KB, and a mask has all states of its sequence and of its next tokens.
    """

    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 200_000
    max_items_in_row: int = 20_000
    max_lexer_states: int = 16_384
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

    __slots__ = (
        "_accepted",
        "_closer",
        "_closes",
        "_compiled",
        "_ended",
        "_fast_forward",
        "_matcher",
        "_may_rebuild",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        compiled: "CompiledLlguidance",
        closer: CloseFinder,
        *,
        fast_forward: bool,
        closes: bool,
        accepted: Sequence[int] = (),
        ended: bool = False,
    ) -> None:
        self._matcher = matcher
        self._compiled = compiled
        self._closer = closer
        self._fast_forward = fast_forward
        self._closes = closes
        self._accepted = list(accepted)
        self._ended = ended
        self._may_rebuild = True

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
        target = bitmask.data_ptr() + row * bitmask.stride(0) * 4, words * 4
        if self._compiled.is_outgrown and self._may_rebuild:
            self._rebuild()
        self._compute(*target)
        if self._matcher.is_error() and self._is_lexer_spent() and self._may_rebuild:
            # This mask, or that of another row, needs more states than the lexer may add to those that it has.
            self._rebuild()
            self._compute(*target)
        if self._matcher.is_error():
            if not self._matcher.get_error().startswith(NOTHING_CAN_FOLLOW):
                raise self._failure()
            bitmask[row].zero_()

    def _compute(self, target: int, size_bytes: int) -> None:
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(target, size_bytes)
        seconds = time.thread_time() - began
        self._compiled.grow(seconds)
        if self._may_rebuild and self._compiled.exceeds_share():
            if self._has_added_states(seconds):
                self._compiled.is_outgrown = True
            else:
                self._compiled.halve_growth()

    def _has_added_states(self, seconds: float) -> bool:
        """Whether the present mask, which took `seconds`, takes less than half when computed again from the start.

        A matcher keeps its last mask, so another one computes it.
        """
        matcher, unread = self._compiled.matcher(), torch.empty_like(self._compiled.end)
        matcher.try_consume_tokens(self._accepted)
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(unread.data_ptr(), unread.nbytes)
        return matcher.is_error() or time.thread_time() - began < seconds / 2

    def _rebuild(self) -> None:
        """Continue on a new build, whose lexer has the states of the accepted tokens only. The old one is freed with its
        last mask.
        """
        compiled = self._compiled.rebuilt()
        matcher = compiled.matcher()
        began = time.thread_time()
        consumed = matcher.try_consume_tokens(self._accepted)
        compiled.grow(time.thread_time() - began)
        self._matcher, self._compiled = matcher, compiled
        if matcher.is_error():
            raise self._failure()
        if consumed != len(self._accepted):
            raise MatcherFailed("a new build of the grammar refuses what the old one accepted")

    def _is_lexer_spent(self) -> bool:
        return bool(self._matcher.get_error().startswith(LEXER_SPENT))

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._compiled.end_token_ids:
            self._ended = self.is_complete()
            return self._ended
        if self._matcher.try_consume_tokens([token_id]) == 1:
            self._accepted.append(token_id)
            return True
        if self._is_lexer_spent() and self._may_rebuild:
            # Another row's mask has spent the common lexer. The next `fill` rebuilds it, and checks this token again.
            self._compiled.is_outgrown = True
            self._accepted.append(token_id)
            return True
        if self._matcher.is_error():
            raise self._failure()
        return False

    def rollback(self, count: int) -> None:
        if self._ended and count > 0:
            self._ended = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise self._failure()
        del self._accepted[len(self._accepted) - count :]

    def fork(self) -> Self:
        copy = type(self)(
            self._matcher.deep_copy(),
            self._compiled,
            self._closer,
            fast_forward=self._fast_forward,
            closes=self._closes,
            accepted=self._accepted,
            ended=self._ended,
        )
        copy._may_rebuild = self._may_rebuild
        return copy

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
        """See `TokenMask`. The decoding step waits for the search, so its copies never build a grammar."""
        if not self._closes:
            return None
        walker = self.fork()
        walker._may_rebuild = False
        return self._closer.find(walker, most)

    @property
    def family(self) -> object:
        """All masks of one compiled grammar share its lexer, behind one lock."""
        return self._compiled

    @property
    def closes(self) -> bool:
        return self._closes

    def _failure(self) -> MatcherFailed:
        message = without_source(self._matcher.get_error()) or "the matcher cannot undo so many tokens"
        if self._is_lexer_spent():
            self._compiled.is_outgrown = True
            return MatcherTooCostly(message)
        return (
            MatcherTooCostly(message) if self._matcher.stop_reason() in WORK_SPENT else MatcherFailed(message)
        )


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end an output, and their bitmask: int32 [words]."""

    ids: frozenset[int]
    bitmask: Tensor


class GrammarOwner(Protocol):
    """What keeps a compiled grammar: it learns of growth, decides whether that is too much, and builds the grammar again."""

    def exceeds_share(self, compiled: "CompiledLlguidance", added_bytes: int) -> bool: ...

    def rebuilt(self) -> "CompiledLlguidance": ...


class CompiledLlguidance:
    """A grammar at its start, from which masks are created.

    Its masks share its lexer, whose states are added while masks are filled. `is_outgrown`: they continue on a new build.
    """

    def __init__(
        self,
        start: LLMatcher,
        source: str,
        tokens: "EndTokens",
        owner: GrammarOwner,
        build_s: float,
    ) -> None:
        self._start = start
        self.end_token_ids = tokens.ids
        self.end = tokens.bitmask
        self._owner = owner
        self.is_outgrown = False
        self.is_quickly_built = build_s < QUICK_BUILD_S
        self._bytes_at_start = BYTES_AT_LEAST + BYTES_PER_SOURCE_BYTE * len(source)
        self._growth_bytes = 0
        self._reported_bytes = 0
        self._rebuilding = threading.Lock()
        self._successor: ref[CompiledLlguidance] | None = None

    @property
    def size_bytes(self) -> int:
        """Estimated from the source and from the masks that were filled."""
        return self._bytes_at_start + min(self._growth_bytes, MAX_GROWTH_BYTES)

    def mask(self, closer: CloseFinder, *, fast_forward: bool, closes: bool) -> LlguidanceMask:
        return LlguidanceMask(self.matcher(), self, closer, fast_forward=fast_forward, closes=closes)

    def matcher(self) -> LLMatcher:
        """Return a matcher at the start."""
        return self._start.deep_copy()

    def grow(self, seconds: float) -> None:
        """Count one mask, or the tokens of a new matcher, by CPU time."""
        slow_s = seconds if seconds > WARM_S else 0.0
        self._growth_bytes += max(GROWTH_PER_MASK, int(slow_s * GROWTH_BYTES_PER_S))

    def exceeds_share(self) -> bool:
        """Report the growth to the owner from time to time. Whether this grammar is one to rebuild if it still grows."""
        if self.is_outgrown or self._growth_bytes - self._reported_bytes < REPORT_BYTES:
            return False
        capped = min(self._growth_bytes, MAX_GROWTH_BYTES)
        added = capped - min(self._reported_bytes, MAX_GROWTH_BYTES)
        self._reported_bytes = self._growth_bytes
        return self._owner.exceeds_share(self, added)

    def halve_growth(self) -> None:
        """Correct the estimate: the time of a mask was not that of new states."""
        self._growth_bytes = min(self._growth_bytes, MAX_GROWTH_BYTES) // 2
        self._reported_bytes = self._growth_bytes

    def rebuilt(self) -> "CompiledLlguidance":
        """Return a new build of this grammar, the same for all masks. Slow. Raises `GrammarInvalid`."""
        with self._rebuilding:
            successor = self._successor() if self._successor is not None else None
            if successor is None or successor.is_outgrown:
                self.is_outgrown = True
                successor = self._owner.rebuilt()
                self._successor = ref(successor)
            return successor


class LlguidanceCompiler:
    """Compiles for one vocabulary; safe to use from several threads. `tokenizer` is the library's form of the
    vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, limits: LlguidanceLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits.parser_limits()
        self.tokenizer = llguidance_tokenizer(vocabulary)
        end = bits_of(vocabulary.end_token_ids, vocabulary.bitmask_words)
        self._end = EndTokens(vocabulary.end_token_ids, end)

    def compile(self, source: str, owner: GrammarOwner) -> CompiledLlguidance:
        """Compile a source of `emit_llguidance.py`. Raises `GrammarInvalid`."""
        grammar = f"{source}\n{self._control_tokens(source)}"
        self._check_named(source)
        began = time.thread_time()
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarInvalid(without_source(matcher.get_error()))
        build_s = time.thread_time() - began
        return CompiledLlguidance(matcher, source, self._end, owner, build_s)

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
