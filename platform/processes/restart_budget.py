"""Decides when a lost process is started again, and when not any more. Times are passed in; nothing waits here."""

from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_DOUBLINGS: Final = 64
"""Bound of an exponent, far beyond the longest delay."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Backoff of restarts: delays double from `first_delay_s` to `max_delay_s`; a restart counts for `window_s`.

    `max_restarts` within the window are a crash loop; None restarts for ever. `is_first_immediate`: the first restart
    within the window has no delay, the second one `first_delay_s`.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 60.0
    max_restarts: int | None = None
    window_s: float = 600.0
    is_first_immediate: bool = False


class RestartBudget:
    """Counts restarts and computes the delay before the next one."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque()
        self.restarts = 0

    def next_delay(self, now: float) -> float | None:
        """Count a restart and return its delay in seconds; None when the process is in a crash loop."""
        policy = self._policy
        while self._recent and self._recent[0] <= now - policy.window_s:
            self._recent.popleft()
        before = len(self._recent)
        if policy.max_restarts is not None and before >= policy.max_restarts:
            return None
        self._recent.append(now)
        self.restarts += 1
        doublings = before - policy.is_first_immediate
        if doublings < 0:
            return 0.0
        return min(policy.first_delay_s * 2.0 ** min(doublings, MAX_DOUBLINGS), policy.max_delay_s)
