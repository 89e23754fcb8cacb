"""What the ledger knows of a tenant, from which its counters are rebuilt: totals per period and open reservations."""

from dataclasses import dataclass
from uuid import UUID

from loraplex.tenants.quotas.reservation import ReservedAmounts


@dataclass(frozen=True, slots=True)
class PeriodTotal:
    """What a subject has settled in one period. The amounts may be larger than any limit."""

    level: str
    subject_id: UUID
    period: str
    tokens: int
    amount_nano: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """What the counters start from: PostgreSQL's totals of the periods around now, and all open reservations.

    `full_buckets` only when this tenant never had counters before. Otherwise buckets of counters that live go on; what lost
    ones had given out nobody knows, so they start empty.
    """

    policy_epoch: int
    totals: tuple[PeriodTotal, ...]
    holds: tuple[ReservedAmounts, ...]
    full_buckets: bool = False
