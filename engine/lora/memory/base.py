"""`AdapterMemory`: the memory from which kernels read adapters, bounded by bytes. The pool decides which adapters stay.

Invariant: all calls come from the step loop, except `pack`, which the loader calls. A placed adapter does not move until it
is removed.
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
    """An adapter in memory, or being copied there. `nbytes` is its share of the budget."""

    slot: int
    packed: PackedAdapter
    nbytes: int
    allocation: Allocation | None = None
    copy: PageCopy | None = None


class AdapterMemory(Protocol):
    """One budget of bytes and `max_slots` slots."""

    max_slots: int
    max_bytes: int

    @property
    def used_bytes(self) -> int: ...

    @property
    def waste_bytes(self) -> int:
        """Bytes that no adapter uses and that an adapter of other shapes cannot get at once."""
        ...

    def pack(self, weights: LoraWeights) -> PackedAdapter:
        """Pack an adapter as it will be placed. Raises `AdapterTooLarge` or `AdapterInexact`. Any thread may call it."""
        ...

    def fits(self, packed: PackedAdapter) -> bool:
        """Whether there is room now."""
        ...

    def victims(self, packed: PackedAdapter, idle: Iterable[Placement]) -> int | None:
        """Return how many of `idle`, from the first on, must be removed for it to fit; None: all are too few."""
        ...

    def place(self, slot: int, packed: PackedAdapter) -> Placement:
        """Start copying an adapter that fits."""
        ...

    def is_there(self, placement: Placement) -> bool:
        """Whether the whole adapter has arrived; never waits."""
        ...

    def install(self, placement: Placement) -> Placement:
        """Make an arrived adapter visible to kernels. The result references only the host memory that kernels read."""
        ...

    def remove(self, placement: Placement) -> None:
        """Remove an installed adapter and give its bytes back."""
        ...

    def close(self) -> None:
        """End the threads."""
        ...
