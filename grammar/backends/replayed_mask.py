"""What masks around an answer's own mask share: copies, and steps back by taking all kept tokens again."""

from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

from torch import Tensor


class AnswerMask(Protocol):
    """The part of a `TokenMask` that an answer needs."""

    def fill(self, bitmask: Tensor, row: int) -> None: ...

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, count: int) -> None: ...

    def fork(self) -> Self: ...

    def is_complete(self) -> bool: ...

    def is_final(self) -> bool: ...

    def forced_tokens(self) -> Sequence[int]: ...

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

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return None

    @property
    def family(self) -> object:
        return self


class ReplayedMask:
    """A mask around that of an answer. `fresh`: the answer's mask at its start, of which only copies advance."""

    def __init__(self, fresh: AnswerMask) -> None:
        self._fresh = fresh
        self._reset()

    def _reset(self) -> None:
        self._answer = self._fresh.fork()
        self._accepted: list[int] = []

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if it is not allowed."""
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        kept = self._accepted[: len(self._accepted) - count]
        self._reset()
        for token_id in kept:
            self.accept(token_id)

    def fork(self) -> Self:
        same = copy(self)
        same._answer, same._accepted = self._answer.fork(), list(self._accepted)
        return same
