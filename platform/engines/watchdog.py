"""Decides when a child is killed, when it is restarted and when not any more. Times are passed in; nothing waits here."""

from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_DOUBLINGS: Final = 64
"""Bound of an exponent, far beyond the longest delay."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Backoff of restarts: delays double from `first_delay_s` to `max_delay_s`; a restart counts for `window_s`.

    `max_restarts` within the window are a crash loop; None restarts for ever.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 60.0
    max_restarts: int | None = None
    window_s: float = 600.0


class RestartBudget:
    """Counts restarts and computes the delay before the next one."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque()
        self.restarts = 0

    def next_delay(self, now: float) -> float | None:
        """Count a restart and return its delay in seconds; None when the child is in a crash loop."""
        policy = self._policy
        while self._recent and self._recent[0] <= now - policy.window_s:
            self._recent.popleft()
        if policy.max_restarts is not None and len(self._recent) >= policy.max_restarts:
            return None
        delay = policy.first_delay_s * 2.0 ** min(len(self._recent), MAX_DOUBLINGS)
        self._recent.append(now)
        self.restarts += 1
        return min(delay, policy.max_delay_s)


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """A child that answers no ping for `unresponsive_s`, or has work and completes no step for `hang_s`, is killed."""

    unresponsive_s: float = 30.0
    hang_s: float = 120.0


def kill_reason(limits: WatchdogConfig, silent_s: float, busy: bool, since_step_s: float) -> str | None:
    """Why the child must be killed; None while it is healthy."""
    if silent_s > limits.unresponsive_s:
        return f"it answered nothing for {silent_s:.1f} s"
    if busy and since_step_s > limits.hang_s:
        return f"it has work and completed no step for {since_step_s:.1f} s"
    return None
