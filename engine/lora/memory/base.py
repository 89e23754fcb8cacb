"""`AdapterMemory`: where adapters lie that kernels can reach, bounded by bytes. The pool decides who stays.

Invariant: all calls come from the step loop but for `pack`, which the loader makes; what is placed stays where it is until
it is removed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.memory.page_copy import PageCopy
from loraplex.engine.lora.memory.slab_allocator import Allocation
from loraplex.engine.lora.weights import LoraWeights


@dataclass(frozen=True, slots=True)
class Placement:
    """An adapter in memory, or on its way there. `nbytes` is what it takes of the budget."""

    slot: int
    packed: PackedAdapter
    nbytes: int
    allocation: Allocation | None = None
    copy: PageCopy | None = None


class AdapterMemory(Protocol):
    """One budget of bytes and `max_slots` slots."""

    @property
    def max_slots(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def waste_bytes(self) -> int:
        """Bytes that no adapter uses and that an adapter of other shapes cannot get at once."""
        ...

    def pack(self, weights: LoraWeights) -> PackedAdapter:
        """The adapter as it will be placed. Raises `AdapterTooLarge` or `AdapterInexact`. On any thread."""
        ...

    def fits(self, packed: PackedAdapter) -> bool:
        """Whether there is room now."""
        ...

    def victims(self, packed: PackedAdapter, idle: Iterable[Placement]) -> int | None:
        """How many of `idle`, from the first on, must be removed for it to fit; None: all are too few."""
        ...

    def place(self, slot: int, packed: PackedAdapter) -> Placement:
        """Begin to bring an adapter that fits."""
        ...

    def is_there(self, placement: Placement) -> bool:
        """Whether all of it has come; never waits."""
        ...

    def install(self, placement: Placement) -> Placement:
        """Let kernels reach what is there. What is returned holds no host memory but what they read."""
        ...

    def remove(self, placement: Placement) -> None:
        """Forget an installed adapter and give its bytes back."""
        ...

    def close(self) -> None:
        """End what runs beside the step loop."""
        ...
