"""Replies of the counters. Invariant: a denial lists every limit that was tested, not only the first that failed."""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from loraplex.tenants.billing.pricing import PICO_PER_NANO
from loraplex.tenants.quotas.limits import RATES, Level, LimitName

RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The test of one limit for one request. Budgets in micro-units of money, rounded up.

    `used` and `reserved` are before this request, which needs `asked`. `retry_after_s`: when it may pass; zero if it
    passed, None if it never can. `used` of a rate is what its bucket lacks, of a concurrency the running sequences.
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
        """What is left; after this request, if it passed this limit."""
        return max(0, self.limit - self.used - self.reserved - (self.asked if self.passed else 0))

    @property
    def reset_s(self) -> float | None:
        """For a rate: the time until its bucket is full if nothing else is admitted."""
        if self.name not in RATES or self.limit == 0:
            return None
        return min(60.0, (self.limit - self.remaining) * 60 / self.limit)

    @property
    def exhausted(self) -> bool:
        """Whether it failed and waiting for open requests or the bucket does not help: no retry passes before the period's end."""
        if self.passed or self.retry_after_s is None:
            return not self.passed
        periodic = self.name.endswith(("_per_day", "_per_month"))
        return periodic and self.used + self.asked > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """All limits passed and the amounts are reserved. `epoch`: that of the counters. `overdue`: the tenant's expired leases.

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
        """The failed limit with the longest wait."""
        failed = [decision for decision in self.decisions if not decision.passed]
        return max(failed, key=lambda decision: (decision.exhausted, wait(decision)))

    @property
    def exhausted(self) -> bool:
        """Whether trying again soon cannot help."""
        return self.deciding.exhausted


@dataclass(frozen=True, slots=True)
class CountersMissing:
    """The counters are new or lost: they must be rebuilt before anything is admitted."""


@dataclass(frozen=True, slots=True)
class PolicyOutdated:
    """The tenant, key or limits have changed since the request read them. `policy_epoch` is the newest."""

    policy_epoch: int


@dataclass(frozen=True, slots=True)
class AlreadyEnded:
    """The reservation of this id was settled or cancelled before; nothing was written."""


CounterReply = Admitted | Denied | CountersMissing | PolicyOutdated | AlreadyEnded


@dataclass(frozen=True, slots=True)
class Settled:
    """The result of ending a reservation. `found`: there was one, and it was removed. `charged`: there was none, and the use
    was added anyway. `epoch`: that of the counters, 0 without counters.
    """

    found: bool
    charged: bool = False
    epoch: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PeriodUse:
    """The settled use of a tenant in one period."""

    period: str
    tokens: int
    amount_nano: int

    @property
    def amount_pico(self) -> int:
        """The amount as the ledger has it."""
        return self.amount_nano * PICO_PER_NANO


@dataclass(frozen=True, slots=True)
class SettledUse:
    """The settled use of a tenant in the day and the month of `at`, under an epoch. `open`: ids open at that time."""

    epoch: int
    at: datetime
    uses: tuple[PeriodUse, PeriodUse]
    open: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The result of a heartbeat. `epoch` None: there are no counters, and nothing was done.

    `lost`: ids without a reservation that were not recreated, because they have ended or belong to another epoch.
    """

    epoch: int | None
    extended: frozenset[UUID] = frozenset()
    recreated: frozenset[UUID] = frozenset()
    lost: frozenset[UUID] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """The current use of one limit. Except for rates it is counted also without a limit. Budgets in micro-units."""

    level: Level
    subject_id: UUID
    name: LimitName
    limit: int | None
    used: int
    reserved: int
    resets_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownLimit:
    """One limit whose remainder is unknown. Budgets in micro-units of money, rounded up."""

    level: Level
    name: LimitName
    limit: int
    asked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request was denied. `degraded`: denied without the counters. Then `decisions` are about one gateway's shares of
    the limits, and `unknown` lists the limits that have no shares.
    """

    request_id: str
    at: datetime
    decisions: tuple[Decision, ...]
    unknown: tuple[UnknownLimit, ...] = ()
    degraded: bool = False


def wait(decision: Decision) -> float:
    return float("inf") if decision.retry_after_s is None else decision.retry_after_s
