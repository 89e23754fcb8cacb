"""`ImmediateStream`: a stream of copies whose arena lies in host memory, so that every copy is done at once."""

from collections.abc import Iterable

from torch import Tensor

from loraplex.engine.lora.memory.page_copy import Mark, Span


class _Reached:
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class ImmediateStream:
    """Implements `CopyStream`."""

    def computed(self) -> Mark | None:
        return None

    def start_after(self, mark: Mark | None) -> None:
        """Do nothing: all work is done."""

    def copy(self, target: Tensor, source: Tensor, spans: Iterable[Span]) -> None:
        for begin, to, nbytes in spans:
            target[to : to + nbytes] = source[begin : begin + nbytes]

    def mark(self) -> Mark:
        return _Reached()
