"""What the counters answer. Invariant: a denial names every limit that was tested, not only the first that failed."""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from loraplex.tenants.quotas.limits import RATES, Level, LimitName

RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One limit, as one admission found it. Budgets in micro-units of money, rounded up.

    `used` and `reserved` are before this request, which asked for `asked`. `retry_after_s`: when it may pass; zero if it
    passed, None if it never can. A rate's `used` is what its bucket lacks, a concurrency's what runs.
    """

    level: Level
    name: LimitName
    limit: int
    used: int
    reserved: int
    asked: int
    passed: bool
    retry_after_s: float | None

    @property
    def remaining(self) -> int:
        """After this request, if it passed here."""
        return max(0, self.limit - self.used - self.reserved - (self.asked if self.passed else 0))

    @property
    def reset_s(self) -> float | None:
        """For a rate: when its bucket is full again if nothing else comes."""
        if self.name not in RATES or self.limit == 0:
            return None
        return min(60.0, (self.limit - self.remaining) * 60 / self.limit)

    @property
    def exhausted(self) -> bool:
        """It failed, and waiting for open requests or for the bucket does not help: no retry before the period's end."""
        if self.passed or self.retry_after_s is None:
            return not self.passed
        periodic = self.name.endswith(("_per_day", "_per_month"))
        return periodic and self.used + self.asked > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """`epoch` is that of the counters it was taken from. `overdue`: the tenant's leases that wait for a reaper.

    `repeated`: this id had been admitted already; nothing was written.
    """

    epoch: int
    at: datetime
    day: str
    month: str
    decisions: tuple[Decision, ...]
    overdue: int
    repeated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """At least one limit failed; nothing was taken from any."""

    at: datetime
    decisions: tuple[Decision, ...]
    overdue: int

    @property
    def deciding(self) -> Decision:
        """The failed limit that holds longest."""
        failed = [decision for decision in self.decisions if not decision.passed]
        return max(failed, key=lambda decision: (decision.exhausted, wait(decision)))

    @property
    def exhausted(self) -> bool:
        """Whether trying again soon is of no use."""
        return self.deciding.exhausted


@dataclass(frozen=True, slots=True)
class CountersMissing:
    """The counters are new or lost: they must be seeded before anything is admitted."""


@dataclass(frozen=True, slots=True)
class PolicyOutdated:
    """The tenant, key or limits have changed since the request's were read; `policy_epoch` is the newest."""

    policy_epoch: int


@dataclass(frozen=True, slots=True)
class AlreadyEnded:
    """The reservation of this id was settled or released before; nothing was written."""


CounterReply = Admitted | Denied | CountersMissing | PolicyOutdated | AlreadyEnded


@dataclass(frozen=True, slots=True)
class Settled:
    """`found`: there was a reservation, now there is none. `charged`: there was none, and its use was added anyway.

    `epoch`: that of the counters, 0 when they are not seeded.
    """

    found: bool
    charged: bool = False
    epoch: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PeriodUse:
    """What a tenant has settled in one period."""

    period: str
    tokens: int
    amount_nano: int


@dataclass(frozen=True, slots=True)
class SettledUse:
    """What a tenant has settled in the day and the month of `at`, under an epoch; `open`: what was open then."""

    epoch: int
    at: datetime
    uses: tuple[PeriodUse, PeriodUse]
    open: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`epoch` None: the counters are not seeded, and nothing was done.

    `lost` are the ids that have no reservation and were not made anew: ended, or from another epoch.
    """

    epoch: int | None
    extended: frozenset[UUID] = frozenset()
    recreated: frozenset[UUID] = frozenset()
    lost: frozenset[UUID] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """What is used of one limit now; also counted where there is no limit, except for rates. Budgets in micro-units."""

    level: Level
    subject_id: UUID
    name: LimitName
    limit: int | None
    used: int
    reserved: int
    resets_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownLimit:
    """One limit of which nobody could tell what is left. Budgets in micro-units of money, rounded up."""

    level: Level
    name: LimitName
    limit: int
    asked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request was denied. `degraded`: without the counters, so that `decisions` are of one gateway's shares of the
    limits, and `untold` are those that have no shares.
    """

    request_id: str
    at: datetime
    decisions: tuple[Decision, ...]
    untold: tuple[UnknownLimit, ...] = ()
    degraded: bool = False


def wait(decision: Decision) -> float:
    return float("inf") if decision.retry_after_s is None else decision.retry_after_s
