"""A circuit breaker of one store: opens after a number of failures in a row, and closes after a successful probe.

Invariant: while it is open, no further request begins to wait for the store that is down.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

FAILURES = 3


@dataclass(slots=True)
class CircuitBreaker:
    """Starts closed. `failed` and `succeeded` report calls of requests. Only `close`, called after a probe, closes it again."""

    max_failures: int = FAILURES
    is_open: bool = False
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _failed_at: float = field(default=-math.inf, init=False)

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, began: float) -> None:
        """Count the failure of a call that began at `began`, a time of `clock`.

        One that began before the last failure was counted ran beside that call: both met the same moment of the store.
        """
        if began < self._failed_at:
            return
        self._failed_at = self.clock()
        self._failures += 1
        if self._failures >= self.max_failures:
            self.is_open = True

    def close(self) -> None:
        self._failures = 0
        self.is_open = False
