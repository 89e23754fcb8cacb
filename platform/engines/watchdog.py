"""Decides when an engine process is killed. Times are passed in; nothing waits here."""

from dataclasses import dataclass


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
