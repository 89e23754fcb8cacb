"""How many engines the requests need, as the signal for an autoscaler.

Invariant: the open requests of a minute count as well as those of a moment, so that waves between two looks are seen.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import Final

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.placement import ASSUMED_ROWS

WINDOW_S: Final = 60.0
TARGET_LOAD: Final = 0.7
"""The part of its rows that an engine shall have in use: the rest is for arrivals until another engine has started."""


class Demand:
    """The requests of one gateway. Their mean number is arrivals times residence (Little's law). `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._at = clock()
        self._open = 0
        self._area = 0.0
        self._mean = 0.0

    def change(self, by: int) -> None:
        """Count a request that arrives, or ends."""
        now = self._clock()
        self._area += self._open * (now - self._at)
        self._at = now
        self._open += by
        if now - self._began >= WINDOW_S:
            self._mean, self._area, self._began = self._area / (now - self._began), 0.0, now

    def engines_wanted(self, engines: Collection[EngineStats]) -> int:
        """By the rows in use and waiting everywhere, or by this gateway's requests of the last minute; at least 1."""
        self.change(0)
        rows = max(sum(each.running + each.waiting for each in engines), self._mean)
        capacity = max((each.max_running for each in engines), default=0) or ASSUMED_ROWS
        return max(1, math.ceil(rows / (TARGET_LOAD * capacity)))
