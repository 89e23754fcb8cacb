"""When a crashed child is started again, and when no more: pure decisions on a clock that is passed in."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `max_delay_s`; more than `max_restarts` within `window_s` end it."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_restarts: int = 8
    window_s: float = 600.0


class RestartBudget:
    """Counts restarts and says how long to wait before the next one."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque()
        self.restarts = 0

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before a restart, None when the child is in a crash loop."""
        while self._recent and self._recent[0] <= now - self._policy.window_s:
            self._recent.popleft()
        if len(self._recent) >= self._policy.max_restarts:
            return None
        delay = self._policy.first_delay_s * 2.0 ** len(self._recent)
        self._recent.append(now)
        self.restarts += 1
        return min(delay, self._policy.max_delay_s)


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """A child that answers nothing for `unresponsive_s`, or has work and makes no step for `hang_s`, is killed."""

    unresponsive_s: float = 30.0
    hang_s: float = 120.0


def verdict(limits: WatchdogConfig, silent_s: float, busy: bool, since_step_s: float) -> str | None:
    """Why the child must be killed, None while it is well."""
    if silent_s > limits.unresponsive_s:
        return f"it answered nothing for {silent_s:.1f} s"
    if busy and since_step_s > limits.hang_s:
        return f"it has work and made no step for {since_step_s:.1f} s"
    return None
