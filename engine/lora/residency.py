"""`AdapterResidency`: what the scheduler may ask about adapters on the device. Pure Python; never blocks."""

from enum import Enum, auto
from typing import Protocol

from loraplex.engine.errors import AdapterError
from loraplex.engine.messages import AdapterRef


class AdapterState(Enum):
    """FAILED and QUARANTINED carry an error; FAILED is forgotten once reported, so that a later request retries."""

    ABSENT = auto()
    LOADING = auto()
    RESIDENT = auto()
    FAILED = auto()
    QUARANTINED = auto()


class AdapterResidency(Protocol):
    """Bounded by bytes. A pinned adapter is never evicted; pins count running sequences."""

    def state(self, adapter: AdapterRef) -> AdapterState: ...

    def prefetch(self, adapter: AdapterRef) -> bool:
        """Start loading, for which unpinned adapters (LRU) are evicted; False while as much is under way as may be."""
        ...

    def load_seconds(self, adapter: AdapterRef) -> float:
        """What bringing this adapter to the device takes by measured rates; once it is there, what it took."""
        ...

    def pin(self, adapter: AdapterRef) -> None:
        """Hold a RESIDENT adapter on the device."""
        ...

    def unpin(self, adapter: AdapterRef) -> None: ...

    def abandon(self, adapter: AdapterRef) -> None:
        """Nobody waits for this adapter any more: what its load holds is given back, a FAILED error is forgotten."""
        ...

    def take_error(self, adapter: AdapterRef) -> AdapterError:
        """The error of a FAILED or QUARANTINED adapter; clears FAILED."""
        ...
