"""`TokenMask` of thought before an answer: free text, at most a number of tokens, the end marker, then the answer's own mask.

Invariant: the end marker ends at a token's end, and the thought holds no other spelling of it. So the text alone tells both apart.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from loraplex.grammar.backends.bitmask import bits_of
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import Thought
from loraplex.grammar.thought import follow

MAX_BLANK_LINES = 2
"""Line breaks between the end marker and an answer that cannot begin with one: templates write two."""


class AnswerMask(Protocol):
    """The part of a `TokenMask` that an answer needs."""

    def fill(self, bitmask: Tensor, row: int) -> None: ...

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, count: int) -> None: ...

    def fork(self) -> Self: ...

    def is_complete(self) -> bool: ...

    def is_final(self) -> bool: ...

    def forced_tokens(self) -> Sequence[int]: ...

    def certain_tokens(self) -> Sequence[int]: ...

    def closing_tokens(self, most: int) -> Sequence[int] | None: ...

    @property
    def family(self) -> object: ...

    @property
    def closes(self) -> bool: ...


class AnyTextMask:
    """An answer that is any text."""

    closes = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def fill(self, bitmask: Tensor, row: int) -> None:
        bitmask[row].fill_(-1)

    def accept(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size

    def rollback(self, count: int) -> None:
        """There is nothing to undo."""

    def fork(self) -> Self:
        return self

    def is_complete(self) -> bool:
        return True

    def is_final(self) -> bool:
        return False

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def certain_tokens(self) -> Sequence[int]:
        return ()

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return None

    @property
    def family(self) -> object:
        return self


class MarkerTokens:
    """The tokens of one vocabulary around two markers. Bitmasks are int32 [words], by the bytes of a marker that are matched.

    `start_id`, `end_id`: the markers that are one token. Then no other tokens spell them.
    """

    def __init__(self, vocabulary: Vocabulary, start: str, end: str) -> None:
        self._vocabulary = vocabulary
        self.token_bytes = vocabulary.token_bytes
        self.start, self.end = start.encode(), end.encode()
        added = {token.content: id for id, token in vocabulary.tokenizer.get_added_tokens_decoder().items()}
        self.start_id, self.end_id = added.get(start), added.get(end)
        words = vocabulary.bitmask_words
        controls = {
            *vocabulary.special_tokens.values(),
            *vocabulary.end_token_ids,
            self.start_id,
            self.end_id,
        }
        text = (id for id, data in enumerate(self.token_bytes) if data and id not in controls)
        self._text = bits_of(text, words)
        self._end_bit = bits_of([] if self.end_id is None else [self.end_id], words)
        self.in_thought = [self._in_thought(matched) for matched in range(len(self.end))]
        self._openings = [self._opening(matched) for matched in range(len(self.start))]
        blank_lines = {b"\n" * count for count in range(1, MAX_BLANK_LINES + 1)}
        self.blank_lines = {id: len(data) for id, data in enumerate(self.token_bytes) if data in blank_lines}

    @cached_property
    def blank_line_bits(self) -> list[Tensor]:
        """The tokens of at most so many line breaks."""
        words = self._vocabulary.bitmask_words
        counts = range(MAX_BLANK_LINES + 1)
        return [bits_of((id for id, n in self.blank_lines.items() if n <= most), words) for most in counts]

    def opening(self, matched: int) -> tuple[Tensor, Tensor]:
        """The tokens that spell the start marker on, and those that would spell it in another way than its own."""
        return self._openings[matched]

    def spelled(self, matched: int) -> tuple[int, ...]:
        """The tokens that end the thought, of which `matched` bytes of the end marker are written."""
        if self.end_id is not None:
            return (self.end_id,)
        rest = self.end[matched:]
        ids = self._vocabulary.text_tokenizer.encode(rest.decode(), add_special_tokens=False).ids
        # Tokenizers that begin every text with a blank spell another one.
        return tuple(ids) if b"".join(map(self.token_bytes.__getitem__, ids)) == rest else self._greedy(rest)

    def _greedy(self, text: bytes) -> tuple[int, ...]:
        ids = []
        while text:
            fitting = (i for i, data in enumerate(self.token_bytes) if data and text.startswith(data))
            longest = max(fitting, key=lambda i: len(self.token_bytes[i]))
            ids.append(longest)
            text = text[len(self.token_bytes[longest]) :]
        return tuple(ids)

    def _in_thought(self, matched: int) -> Tensor:
        rest = self.end[matched:]
        may_end = [i for i, data in enumerate(self.token_bytes) if data.startswith(rest) or self.end in data]
        ends = {i: follow(self.end, matched, self.token_bytes[i])[1] for i in may_end}
        wrong = (
            i
            for i, end in ends.items()
            if end is not None and (self.end_id is not None or end < len(self.token_bytes[i]))
        )
        return (self._text & ~bits_of(wrong, self._vocabulary.bitmask_words)) | self._end_bit

    def _opening(self, matched: int) -> tuple[Tensor, Tensor]:
        words, rest = self._vocabulary.bitmask_words, self.start[matched:]
        spelling = [i for i, data in enumerate(self.token_bytes) if data and rest.startswith(data)]
        wrong = [
            i for i, data in enumerate(self.token_bytes) if len(data) > len(rest) and data.startswith(rest)
        ]
        if self.start_id is None:
            return bits_of(spelling, words), bits_of(wrong, words)
        own = [self.start_id] if not matched else []
        wrong += [i for i in spelling if self.token_bytes[i] == rest and i != self.start_id]
        return bits_of(own, words), bits_of(wrong, words)


class ThoughtMask:
    """One sequence. Used by one thread at a time. `fresh` is the answer's mask at its start, of which only copies advance."""

    __slots__ = (
        *(
            "_accepted",
            "_answer",
            "_blank_lines",
            "_count",
            "_forced",
            "_fresh",
            "_in_answer",
            "_is_open",
            "_matched",
        ),
        *("_thought", "_tokens"),
    )

    def __init__(self, thought: Thought, tokens: MarkerTokens, fresh: AnswerMask) -> None:
        self._thought, self._tokens, self._fresh = thought, tokens, fresh
        self._reset()

    def _reset(self) -> None:
        self._accepted: list[int] = []
        self._answer: AnswerMask | None = self._fresh.fork()
        self._is_open = self._in_answer = False
        self._matched = self._count = self._blank_lines = 0
        self._forced: tuple[int, ...] = ()
        if self._thought.begun:
            self._begin()

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write every word of the row of an int32 CPU tensor [rows, words]. Raises what the answer's mask raises."""
        target = bitmask[row]
        if self._forced:
            target.zero_()
            token = self._forced[0]
            target[token // 32] = torch.tensor(1 << (token % 32), dtype=torch.int64).to(torch.int32)
        elif self._is_open:
            target.copy_(self._tokens.in_thought[self._matched])
        else:
            self._fill_answer(bitmask, row)

    def _fill_answer(self, bitmask: Tensor, row: int) -> None:
        target = bitmask[row]
        if self._answer is None:
            target.zero_()
        else:
            self._answer.fill(bitmask, row)
        if not self._in_answer:
            opening, wrong = self._tokens.opening(self._matched)
            target.bitwise_and_(~wrong).bitwise_or_(opening)
        elif self._blank_lines:
            target.bitwise_or_(self._tokens.blank_line_bits[self._blank_lines])

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if it is not allowed."""
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
        if not 0 <= token_id < len(allowed) * 32 or not int(allowed[token_id // 32]) >> (token_id % 32) & 1:
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
        continues = self._answer is not None and self._answer.accept(token_id)
        if not spells_on or (tokens.start_id is not None and not continues):
            self._in_answer = continues
            return continues
        self._answer = self._answer if continues else None
        self._matched += len(data)
        if self._matched == len(tokens.start):
            self._answer = self._fresh.fork()
            self._begin()
        return True

    def _accept_answer(self, token_id: int) -> bool:
        lines, self._blank_lines = self._blank_lines, 0
        if self._answer is not None and self._answer.accept(token_id):
            return True
        self._blank_lines = lines - self._tokens.blank_lines.get(token_id, lines + 1)
        if self._blank_lines >= 0:
            return True
        self._blank_lines = lines
        return False

    def _begin(self) -> None:
        self._is_open, self._matched = True, 0
        self._force_at_the_bound()

    def _force_at_the_bound(self) -> None:
        if self._thought.most is not None and self._count >= self._thought.most:
            self._forced = self._tokens.spelled(self._matched)

    def _end(self) -> None:
        self._is_open, self._in_answer, self._blank_lines = False, True, MAX_BLANK_LINES

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens, by taking all others again."""
        kept = self._accepted[: len(self._accepted) - count]
        self._reset()
        for token_id in kept:
            self.accept(token_id)

    def fork(self) -> Self:
        copy = type(self)(self._thought, self._tokens, self._fresh)
        for name in self.__slots__:
            setattr(copy, name, getattr(self, name))
        copy._accepted = list(self._accepted)
        copy._answer = None if self._answer is None else self._answer.fork()
        return copy

    def is_complete(self) -> bool:
        return not self._is_open and self._answer is not None and self._answer.is_complete()

    def is_final(self) -> bool:
        # Before the answer has begun, thought or blank lines may follow.
        return (
            self._in_answer and not self._blank_lines and self._answer is not None and self._answer.is_final()
        )

    def forced_tokens(self) -> Sequence[int]:
        """At the bound the end marker; in an answer what its own mask says, which knows nothing of a marker or blank lines."""
        if self._is_open:
            return self._forced
        return self._answer.forced_tokens() if self._answer is not None and self._is_inside() else ()

    def certain_tokens(self) -> Sequence[int]:
        """Like `forced_tokens`, whether or not the request enables fast-forward."""
        if self._is_open:
            return self._forced
        return self._answer.certain_tokens() if self._answer is not None and self._is_inside() else ()

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        if not self._is_open:
            return None if self._answer is None else self._answer.closing_tokens(most)
        ending = self._forced or self._tokens.spelled(self._matched)
        way = self._fresh.closing_tokens(most - len(ending)) if most >= len(ending) else None
        return None if way is None else (*ending, *way)

    def _is_inside(self) -> bool:
        return self._in_answer and not self._blank_lines

    @property
    def family(self) -> object:
        return self._fresh.family

    @property
    def closes(self) -> bool:
        return self._fresh.closes
