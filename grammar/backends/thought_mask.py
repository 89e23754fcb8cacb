"""`TokenMask` of thought before an answer: free text, at most a number of tokens, the end marker, then the answer's own mask.

Invariant: the end marker ends at a token's end, and the thought holds no other spelling of it. So the text alone tells both apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.grammar.backends.bitmask import bits_of, with_bits
from loraplex.grammar.backends.replayed_mask import AnswerMask, ReplayedMask
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import Thought
from loraplex.grammar.thought import follow

MAX_BLANK_LINES = 2
"""Line breaks between the end marker and an answer that cannot begin with one: templates write two."""


class MarkerTokens:
    """The tokens of one vocabulary around two markers. Bitmasks are int32 [words], by the bytes of a marker that are matched.

    `start_id`, `end_id`: the markers that are one token. Then no other tokens spell them. Raises `GrammarInvalid` for a marker that
    ends an answer.
    """

    is_outgrown = False

    def __init__(self, vocabulary: Vocabulary, start: str, end: str) -> None:
        self.start, self.end = start.encode(), end.encode()
        self.token_bytes = vocabulary.token_bytes
        added = {token.content: id for id, token in vocabulary.tokenizer.get_added_tokens_decoder().items()}
        self.start_id, self.end_id = added.get(start), added.get(end)
        if not vocabulary.end_token_ids.isdisjoint((self.start_id, self.end_id)):
            raise GrammarInvalid("a marker of thought cannot be a token that ends the answer")
        # Searched for once: the rows of the end marker differ in a few tokens.
        self._with_end = [id for id, data in enumerate(self.token_bytes) if self.end in data]
        self.spelled = [self._spelled(vocabulary, matched) for matched in range(len(self.end))]
        self.in_thought = [self._in_thought(vocabulary, matched) for matched in range(len(self.end))]
        self.openings = [self._opening(vocabulary, matched) for matched in range(len(self.start))]
        lines = {count: vocabulary.spelling_of(b"\n" * count) for count in range(1, MAX_BLANK_LINES + 1)}
        self.blank_lines = {id: count for count, ids in lines.items() for id in ids}
        most = range(MAX_BLANK_LINES + 1)
        fitting = ([id for id, count in self.blank_lines.items() if count <= each] for each in most)
        self.blank_line_bits = [bits_of(ids, vocabulary.bitmask_words) for ids in fitting]

    @property
    def size_bytes(self) -> int:
        """Bytes of all bitmasks."""
        return self.in_thought[0].nbytes * (len(self.end) + 2 * len(self.start))

    def _spelled(self, vocabulary: Vocabulary, matched: int) -> tuple[int, ...]:
        """The tokens that end the thought, of which `matched` bytes of the end marker are written."""
        if self.end_id is not None:
            return (self.end_id,)
        rest = self.end[matched:]
        ids = vocabulary.spelled(rest.decode())
        # Tokenizers that begin every text with a blank spell another one.
        is_exact = b"".join(map(self.token_bytes.__getitem__, ids)) == rest
        return tuple(ids if is_exact else _greedy(vocabulary, rest))

    def _in_thought(self, vocabulary: Vocabulary, matched: int) -> Tensor:
        may_end = {*self._with_end, *vocabulary.beginning_with(self.end[matched:])}
        ends = {id: follow(self.end, matched, self.token_bytes[id])[1] for id in may_end}
        wrong = [
            id
            for id, end in ends.items()
            if end is not None and (self.end_id is not None or end < len(self.token_bytes[id]))
        ]
        wrong += [] if self.start_id is None else [self.start_id]
        right = [] if self.end_id is None else [self.end_id]
        return with_bits(with_bits(vocabulary.text_bits, (), wrong), right)

    def _opening(self, vocabulary: Vocabulary, matched: int) -> tuple[Tensor, Tensor]:
        """The tokens that spell the start marker on, and those that would spell it in another way than its own."""
        rest, nothing = self.start[matched:], torch.zeros_like(vocabulary.text_bits)
        wrong = [id for id in vocabulary.beginning_with(rest) if len(self.token_bytes[id]) > len(rest)]
        if self.start_id is None:
            right = [id for size in range(1, len(rest) + 1) for id in vocabulary.spelling_of(rest[:size])]
        else:
            right = [] if matched else [self.start_id]
            wrong += [id for id in vocabulary.spelling_of(rest) if id != self.start_id]
        return with_bits(nothing, right), with_bits(nothing, wrong)


def _greedy(vocabulary: Vocabulary, text: bytes) -> list[int]:
    ids: list[int] = []
    while text:
        size = max(size for size in range(1, len(text) + 1) if vocabulary.spelling_of(text[:size]))
        ids.append(vocabulary.spelling_of(text[:size])[0])
        text = text[size:]
    return ids


class ThoughtMask(ReplayedMask):
    """One sequence. Used by one thread at a time."""

    def __init__(self, thought: Thought, tokens: MarkerTokens, fresh: AnswerMask) -> None:
        self._thought, self._tokens = thought, tokens
        super().__init__(fresh)

    def _reset(self) -> None:
        super()._reset()
        # False where the output spells the start marker as no answer can.
        self._may_be_answer = True
        self._is_open = self._in_answer = False
        self._matched = self._count = self._blank_lines = self._answer_begins = 0
        self._forced: tuple[int, ...] = ()
        if self._thought.begun:
            self._begin()

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write every word of the row of an int32 CPU tensor [rows, words]. Raises what the answer's mask raises."""
        target = bitmask[row]
        if self._forced:
            target.copy_(with_bits(torch.zeros_like(target), self._forced[:1]))
        elif self._is_open:
            target.copy_(self._tokens.in_thought[self._matched])
        else:
            self._fill_answer(bitmask, row)

    def _fill_answer(self, bitmask: Tensor, row: int) -> None:
        target = bitmask[row]
        if self._may_be_answer:
            self._answer.fill(bitmask, row)
        else:
            target.zero_()
        if not self._in_answer:
            opening, wrong = self._tokens.openings[self._matched]
            target.bitwise_and_(~wrong).bitwise_or_(opening)
        elif self._blank_lines:
            target.bitwise_or_(self._tokens.blank_line_bits[self._blank_lines])

    def accept(self, token_id: int) -> bool:
        if self._is_open:
            accepted = self._accept_thought(token_id)
        elif self._in_answer:
            accepted = self._accept_answer(token_id)
        else:
            accepted = self._accept_opening(token_id)
        if accepted:
            self._accepted.append(token_id)
        return accepted

    def _accept_thought(self, token_id: int) -> bool:
        if self._forced:
            if token_id != self._forced[0]:
                return False
            self._forced = self._forced[1:]
            if not self._forced:
                self._end()
            return True
        allowed = self._tokens.in_thought[self._matched]
        if not int(allowed[token_id // 32]) >> (token_id % 32) & 1:
            return False
        self._matched, end = follow(self._tokens.end, self._matched, self._tokens.token_bytes[token_id])
        self._count += 1
        if end is not None:
            self._end()
        else:
            self._force_at_the_bound()
        return True

    def _accept_opening(self, token_id: int) -> bool:
        tokens, data = self._tokens, self._tokens.token_bytes[token_id]
        rest = tokens.start[self._matched :]
        if token_id == tokens.start_id and not self._matched:
            self._begin()
            return True
        spells_on = bool(data) and rest.startswith(data) and token_id != tokens.start_id
        if data.startswith(rest) and not (spells_on and tokens.start_id is None):
            return False
        continues = self._may_be_answer and self._answer.accept(token_id)
        if not spells_on or (tokens.start_id is not None and not continues):
            self._in_answer, self._answer_begins = continues, len(self._accepted) + 1
            return continues
        self._may_be_answer = continues
        self._matched += len(data)
        if self._matched == len(tokens.start):
            self._answer, self._may_be_answer = self._fresh.fork(), True
            self._begin()
        return True

    def _accept_answer(self, token_id: int) -> bool:
        if self._answer.accept(token_id):
            self._blank_lines = 0
            return True
        left = self._blank_lines - self._tokens.blank_lines.get(token_id, MAX_BLANK_LINES + 1)
        if left < 0:
            return False
        self._blank_lines, self._answer_begins = left, len(self._accepted) + 1
        return True

    def _begin(self) -> None:
        self._is_open, self._matched = True, 0
        self._force_at_the_bound()

    def _force_at_the_bound(self) -> None:
        if self._thought.most is not None and self._count >= self._thought.most:
            self._forced = self._tokens.spelled[self._matched]

    def _end(self) -> None:
        self._is_open, self._in_answer, self._blank_lines = False, True, MAX_BLANK_LINES
        self._answer_begins = len(self._accepted) + 1

    def rollback(self, count: int) -> None:
        left = len(self._accepted) - count
        if not self._is_inside or left <= self._answer_begins:
            super().rollback(count)
            return
        self._answer.rollback(count)
        del self._accepted[left:]

    def is_complete(self) -> bool:
        return not self._is_open and self._may_be_answer and self._answer.is_complete()

    def is_final(self) -> bool:
        return self._is_inside and self._answer.is_final()

    def forced_tokens(self) -> Sequence[int]:
        """At the bound the end marker; in an answer what its own mask says, which knows nothing of a marker or blank lines."""
        if self._is_open:
            return self._forced
        return self._answer.forced_tokens() if self._is_inside else ()

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        """See `TokenMask`."""
        if not self._is_open:
            return self._answer.closing_tokens(most) if self._may_be_answer else None
        ending = self._forced or self._tokens.spelled[self._matched]
        way = self._answer.closing_tokens(most - len(ending)) if most >= len(ending) else None
        return None if way is None else (*ending, *way)

    @property
    def _is_inside(self) -> bool:
        """Whether the answer has begun, so that neither thought nor blank lines can come before it."""
        return self._in_answer and not self._blank_lines

    @property
    def family(self) -> object:
        return self._answer.family

    @property
    def closes(self) -> bool:
        return self._fresh.closes
