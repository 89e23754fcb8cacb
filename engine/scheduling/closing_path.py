"""`ClosingPath`: a `TokenMask` that allows one token after another of a way already found. It closes documents of rows
whose every token must be sampled, because its log-probability is asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor


class ClosingPath:
    """`end_token` is allowed after the path, for a path that is empty: something has to be sampled."""

    closes = False

    def __init__(self, path: Sequence[int], end_token: int | None, position: int = 0) -> None:
        self._path = tuple(path)
        self._end_token = end_token
        self._position = position

    @property
    def family(self) -> object:
        return self

    def fill(self, bitmask: "Tensor", row: int) -> None:
        token = self._next()
        bitmask[row] = 0
        if token is not None:
            bit = 1 << (token % 32)
            bitmask[row, token // 32] = bit - (1 << 32) if token % 32 == 31 else bit

    def accept(self, token_id: int) -> bool:
        accepted = token_id == self._next()
        self._position += accepted
        return accepted

    def rollback(self, count: int) -> None:
        self._position -= count

    def fork(self) -> Self:
        return type(self)(self._path, self._end_token, self._position)

    def is_complete(self) -> bool:
        return self._position >= len(self._path)

    def is_final(self) -> bool:
        """False for an empty path at its start, where the end token is yet to come."""
        return self.is_complete() and self._position > 0

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        return None

    def _next(self) -> int | None:
        return self._end_token if self.is_complete() else self._path[self._position]
