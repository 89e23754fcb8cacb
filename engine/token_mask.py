"""`TokenMask`: what the engine asks of a grammar. The grammar package's matcher satisfies it; the engine imports none."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class TokenMask(Protocol):
    """The set of tokens that may follow in one sequence. State advances by `accept` only."""

    def fill(self, bitmask: "Tensor", row: int) -> None:
        """Write the allowed tokens into `bitmask[row]`: int32 [rows, ceil(vocab / 32)], bit set = allowed."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...

    def fork(self) -> Self:
        """An independent copy at the same state."""
        ...

    def is_complete(self) -> bool:
        """True when the text so far is a whole document of the grammar."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that must follow, if the grammar leaves no choice; empty otherwise."""
        ...


TokenMaskFactory: TypeAlias = Callable[[bytes], TokenMask]
"""Compiles the bytes of a `GrammarSpec`. May take long: called on a side thread only."""
