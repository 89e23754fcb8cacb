"""A circuit breaker of one store: opens after a number of failures in a row, and closes after a successful probe.

Invariant: while it is open, no request waits for the store that is down.
"""

from dataclasses import dataclass

FAILURES = 3


@dataclass(slots=True)
class CircuitBreaker:
    """Starts closed. `failed` and `succeeded` report calls of requests. Only `close`, called after a probe, closes it again."""

    max_failures: int = FAILURES
    is_open: bool = False
    _failures: int = 0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= self.max_failures:
            self.is_open = True

    def close(self) -> None:
        self._failures = 0
        self.is_open = False
