"""What is left of the limits per minute. Known by errors too: a refusal tells the rates as an admission does."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate limit, after an admission or at a refusal; `reset_s`: when all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateState:
    """The tightest rate of any level; None where nothing is limited."""

    requests: Rate | None = None
    tokens: Rate | None = None
