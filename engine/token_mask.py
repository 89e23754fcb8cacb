"""`TokenMask`: what the engine needs of a grammar. The grammar package's matcher implements it; the engine imports none."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class TokenMask(Protocol):
    """The set of tokens that may follow in one sequence. Only `accept` advances its state.

    Any method may raise: `TimeoutError` when the work limit of the grammar is spent; any other exception means that it
    broke down.
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
        """True when the text so far is a complete document of the grammar."""
        ...

    def is_final(self) -> bool:
        """True when the document is complete and only an end token may follow."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that must follow, if the grammar leaves no choice; empty otherwise. The state does not advance."""
        ...

    def closing_tokens(self, most: int) -> Sequence[int] | None:
        """Return at most `most` tokens that lead from here to a complete document, None when no such way was found.

        Always None unless the request set `closes`.
        """
        ...

    @property
    def family(self) -> object:
        """Equal for masks that may block each other inside their library."""
        ...

    @property
    def closes(self) -> bool:
        """Whether the engine must keep a way to close the document within the remaining tokens."""
        ...


TokenMaskFactory: TypeAlias = Callable[[bytes, bytes], TokenMask]
"""Factory of masks: (tenant namespace, bytes of a `GrammarSpec`) -> a mask at the start. Slow: called on a side thread
only."""
