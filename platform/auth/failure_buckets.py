"""Counts how many keys that do not exist one client network presents (GCRA, ITU-T I.371).

Invariant: bounded memory, and a network whose keys are all valid always has failures left.
"""

import time
from collections.abc import Callable, Hashable
from typing import Final

from cachetools import LRUCache

BURST: Final = 60
REFILL_S: Final = 1.0
MAX_NETWORKS: Final = 10_000


class FailureBuckets:
    """A bucket of `BURST` failures per network, which regains one every `REFILL_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: LRUCache[Hashable, float] = LRUCache(MAX_NETWORKS)

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, network: Hashable) -> bool:
        """Count one failure. Returns False, and counts nothing, when the network has none left."""
        now = self._clock()
        full_at = max(now, self._full_at.get(network, now)) + REFILL_S
        if full_at - now > BURST * REFILL_S:
            return False
        self._full_at[network] = full_at
        return True

    def give_back(self, network: Hashable) -> None:
        """Undo one `take`: it was no failure."""
        if network in self._full_at:
            self._full_at[network] -= REFILL_S
            if self._full_at[network] <= self._clock():
                del self._full_at[network]
