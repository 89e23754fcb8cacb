"""The input of a counter rebuild: a tenant's totals per period and its open reservations, from the ledger."""

from dataclasses import dataclass
from uuid import UUID

from loraplex.tenants.quotas.reservation import Reservation


@dataclass(frozen=True, slots=True)
class PeriodTotal:
    """The settled use of a subject in one period. The amounts may be larger than any limit. Those of one subject are added up."""

    level: str
    subject_id: UUID
    period: str
    tokens: int
    amount_nano: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """What the counters start from: PostgreSQL's totals of the periods around now, and all open reservations.

    `full_buckets`: the tenant never had counters before. Otherwise buckets of live counters continue, and lost buckets
    start empty, since what they had admitted is unknown.
    """

    policy_epoch: int
    totals: tuple[PeriodTotal, ...]
    reservations: tuple[Reservation, ...]
    full_buckets: bool = False
