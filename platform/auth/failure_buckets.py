"""Counts failures by who caused them: keys that do not exist by client network, refused schemas by tenant (GCRA, ITU-T I.371).

Invariant: bounded memory, and who causes no failure always has some left.
"""

import time
from collections.abc import Callable, Hashable
from typing import Final

from cachetools import LRUCache

BURST: Final = 60
REFILL_S: Final = 1.0
MAX_SUBJECTS: Final = 10_000


class FailureBuckets:
    """A bucket of `BURST` failures of each subject, which regains one every `REFILL_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: LRUCache[Hashable, float] = LRUCache(MAX_SUBJECTS)

    def __len__(self) -> int:
        return len(self._full_at)

    def is_empty(self, subject: Hashable) -> bool:
        """Whether `take` would return False."""
        now = self._clock()
        return self._full_at.get(subject, now) + REFILL_S - now > BURST * REFILL_S

    def take(self, subject: Hashable) -> bool:
        """Count one failure. Returns False, and counts nothing, when the subject has none left."""
        now = self._clock()
        if self.is_empty(subject):
            return False
        self._full_at[subject] = max(now, self._full_at.get(subject, now)) + REFILL_S
        return True

    def give_back(self, subject: Hashable) -> None:
        """Undo one `take`: it was no failure."""
        if subject in self._full_at:
            self._full_at[subject] -= REFILL_S
            if self._full_at[subject] <= self._clock():
                del self._full_at[subject]
