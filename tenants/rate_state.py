"""The state of the limits per minute; admissions and refusals both report it, so errors import it too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate limit after an admission or a refusal. `reset_s`: the time until its bucket is full."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateState:
    """The tightest rates of all levels; None without a limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
