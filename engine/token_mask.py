"""`TokenMask`: what the engine asks of a grammar. The grammar package's matcher satisfies it; the engine imports none."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class TokenMask(Protocol):
    """The set of tokens that may follow in one sequence. State advances by `accept` only.

    Any method may raise: `TimeoutError` when the work the grammar may cause is spent, else it broke down.
    """

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

    def is_final(self) -> bool:
        """True when the document is whole and nothing but an end token may follow."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that must follow, if the grammar leaves no choice; empty otherwise. The state does not advance."""
        ...

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        """At most `most` tokens that lead from here to a whole document, None when no such way was found.

        Always None unless the request asked for its document to be closed; see `closes`.
        """
        ...

    @property
    def family(self) -> object:
        """Equal for masks of which a call on one may wait for a call on another, inside their library."""
        ...

    @property
    def closes(self) -> bool:
        """Whether the engine is to keep a way to the end of the document within the remaining tokens."""
        ...


TokenMaskFactory: TypeAlias = Callable[[bytes, bytes], TokenMask]
"""(tenant namespace, bytes of a `GrammarSpec`) -> a mask at the start. May take long: called on a side thread only."""
