"""A circuit breaker: after so many failures in a row nobody asks any more, until a probe has succeeded.

Invariant: while it is open, no request waits for what is down.
"""

from dataclasses import dataclass

FAILURES = 3


@dataclass(slots=True)
class CircuitBreaker:
    """Starts closed. `failed` and `succeeded` count calls of requests; only `close` after a probe closes it again."""

    most_failures: int = FAILURES
    is_open: bool = False
    _failures: int = 0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= self.most_failures:
            self.is_open = True

    def close(self) -> None:
        self._failures = 0
        self.is_open = False
