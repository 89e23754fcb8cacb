"""`AdapterResidency`: what the scheduler asks about adapters on the device. Pure Python; never blocks."""

from enum import Enum, auto
from typing import Protocol

from loraplex.engine.errors import AdapterError
from loraplex.engine.messages import AdapterRef, AdapterTier


class AdapterState(Enum):
    """FAILED and QUARANTINED carry an error; FAILED is forgotten once reported, so that a later request retries."""

    ABSENT = auto()
    LOADING = auto()
    RESIDENT = auto()
    FAILED = auto()
    QUARANTINED = auto()


class AdapterResidency(Protocol):
    """Bounded by bytes. A pinned adapter is never evicted; pins count running sequences, and the arrival for one."""

    def state(self, adapter: AdapterRef) -> AdapterState: ...

    def tier(self, adapter: AdapterRef) -> AdapterTier:
        """Where the adapter is; of one that is loading, where it comes from."""
        ...

    def size_bytes(self, adapter: AdapterRef) -> int:
        """Bytes of an adapter that was loaded before; 0 if it is unknown."""
        ...

    def prefetch(self, adapter: AdapterRef) -> bool:
        """Start loading, evicting unpinned adapters (LRU) for it; False while the loads in progress, or
        those of its tenant, reach their bound.
        """
        ...

    def lacks_room(self, adapter: AdapterRef) -> bool:
        """Whether an adapter that is loading was read and finds no room beside the pinned ones, as far as it is known."""
        ...

    def place(self, adapter: AdapterRef) -> None:
        """Place an adapter that waits for room before the others that do."""
        ...

    def load_seconds(self, adapter: AdapterRef) -> float:
        """Seconds of bringing this adapter to the device: an estimate by measured rates, and the measured time once it is
        there.
        """
        ...

    def pin(self, adapter: AdapterRef) -> None:
        """Keep a RESIDENT adapter on the device."""
        ...

    def unpin(self, adapter: AdapterRef) -> None: ...

    def abandon(self, adapter: AdapterRef) -> None:
        """Report that no sequence waits for this adapter any more: its load's memory is given back, a FAILED error is
        forgotten.
        """
        ...

    def take_error(self, adapter: AdapterRef) -> AdapterError:
        """The error of a FAILED or QUARANTINED adapter; clears FAILED."""
        ...
