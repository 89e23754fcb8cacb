"""Replays a draft of limits over what was used: how many requests it would have refused, and when first.

Invariant: requests that come at the begin of their steps, and use what they reserve, are refused as by admission. It is an
estimate for others: admission refuses more, since it reserves the most that a request may use; or less, since buckets fill
within a step, too. A step is refused in parts as its mean request. Sessions are not told apart: their limit is not replayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from loraplex.tenants.admission.local_limiter import Bucket
from loraplex.tenants.ledger.usage_steps import PeriodUse, UsageStep
from loraplex.tenants.periods import Periods, periods_of
from loraplex.tenants.quotas.limits import (
    BUDGETS,
    COUNTED,
    NANO_PER_MICRO,
    PER_SESSION,
    RATES,
    LimitName,
    QuotaLimits,
)

_REQUESTS: Final = "requests_per_minute"
_CONCURRENT: Final = "concurrent_requests"


@dataclass(slots=True)
class ReplayedLimit:
    """One limit of a draft: how many requests it would have refused, also those that another limit refuses, and when first."""

    name: LimitName
    limit: int
    refused: int = 0
    first: datetime | None = None


@dataclass(slots=True)
class Replay:
    """A draft of limits, and what it did to the steps that were added, oldest first. `used_before`: what had been used of the
    periods in which they begin. Requests that it refuses use nothing of any limit.
    """

    draft: QuotaLimits
    used_before: Mapping[str, PeriodUse]
    requests: int = 0
    refused: int = 0
    since: datetime | None = None
    first: datetime | None = None
    limits: list[ReplayedLimit] = field(init=False)
    _buckets: dict[str, Bucket] = field(init=False)
    _used: dict[str, PeriodUse] = field(init=False)

    def __post_init__(self) -> None:
        given = ((name, self.draft.get(name)) for name in COUNTED if name != PER_SESSION)
        self.limits = [ReplayedLimit(name, limit) for name, limit in given if limit is not None]
        self._buckets = {name: Bucket() for name in RATES}
        self._used = dict(self.used_before)

    def add(self, step: UsageStep) -> None:
        """Replay the next step."""
        admitted, periods = step.requests, periods_of(step.start)
        for each in self.limits:
            passed = self._passed(each, step, periods)
            admitted = min(admitted, passed)
            if passed < step.requests:
                each.refused += step.requests - passed
                each.first = each.first or step.start
        self.requests += step.requests
        self.since = self.since or step.start
        if admitted < step.requests:
            self.refused += step.requests - admitted
            self.first = self.first or step.start
        self._use(step, periods, admitted)

    def _passed(self, each: ReplayedLimit, step: UsageStep, periods: Periods) -> int:
        """How many requests of the step one limit lets pass."""
        if each.name == _CONCURRENT:
            return step.requests - step.crowded
        if each.name in RATES:
            bucket = self._buckets[each.name]
            bucket.refill(each.limit, step.start.timestamp())
            room = int(each.limit - bucket.lacking)
            return _part(step, room, step.requests if each.name == _REQUESTS else step.tokens)
        period = periods.day if each.name.endswith("_per_day") else periods.month
        used = self._used.get(period, PeriodUse())
        if each.name in BUDGETS:
            return _part(step, each.limit * NANO_PER_MICRO - used.amount_nano, step.amount_nano)
        return _part(step, each.limit - used.tokens, step.tokens)

    def _use(self, step: UsageStep, periods: Periods, admitted: int) -> None:
        tokens, amount = (whole * admitted // step.requests for whole in (step.tokens, step.amount_nano))
        for name, bucket in self._buckets.items():
            bucket.lacking += admitted if name == _REQUESTS else tokens
        for period in (periods.day, periods.month):
            used = self._used.get(period, PeriodUse())
            self._used[period] = PeriodUse(used.tokens + tokens, used.amount_nano + amount)


def _part(step: UsageStep, room: int, needed: int) -> int:
    """How many requests of the step pass where there is room for a part of what all of them need."""
    if room < 0:
        return 0
    return step.requests if needed <= room else room * step.requests // needed
