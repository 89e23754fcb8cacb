"""`TimeLeft`: how long a job may still take, so that it ends by itself with every line it has a figure for.

Invariant: what has started may end: a part or a round begins only where its estimate, or the longest so far, still fits.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MARGIN_S = 5.0
"""Of a job's seconds: the process and its imports before, closing an engine and the process's end behind."""


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Counts down to `ends`, by `clock` in seconds."""

    ends: float
    clock: Callable[[], float] = time.monotonic

    @staticmethod
    def of(seconds: float) -> "TimeLeft":
        """Of a job that begins now and may take so many seconds with its process."""
        return TimeLeft(time.monotonic() + seconds - MARGIN_S)

    @property
    def seconds(self) -> float:
        """Below 0 when it is over."""
        return self.ends - self.clock()

    def fits(self, estimate: float) -> bool:
        """Whether a part of so many seconds may begin."""
        return estimate <= self.seconds

    def rounds(self, most: int) -> Iterator[int]:
        """Numbers of rounds that fit, `most` of them and at least one."""
        longest = 0.0
        for number in range(most):
            began = self.clock()
            if number and not self.fits(longest):
                return
            yield number
            longest = max(longest, self.clock() - began)
