"""What goes into the books: a reservation when a request is admitted, its usage when it ends.

Invariant: both bear the admission's id, and the periods of its admission.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from uuid import UUID, uuid5

from loraplex.tenants.quotas.counter_request import Actual

LATE = "late"


class Reserved(Enum):
    """What became of a reservation."""

    KEPT = "kept"
    EPOCH_LOCKED = "epoch_locked"
    EPOCH_MOVED = "epoch_moved"
    POLICY_STALE = "policy_stale"


@dataclass(frozen=True, slots=True)
class ReservedUnder:
    """`epoch`: the tenant's when the row was written, held until it was; later seedings know the row."""

    outcome: Reserved
    epoch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRow:
    """What a request may use at most. `epoch` is that of the counters that admitted it; None when no counters did."""

    id: UUID
    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    digest: str | None
    gateway_id: UUID
    prompt_tokens: int
    completion_tokens: int
    amount_nano: int
    day: str
    month: str
    admitted_at: datetime
    lease_s: float
    epoch: int | None
    policy_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What a request used. `outcome` None: it never began, so its reservation is taken back and nothing is written."""

    id: UUID
    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    adapter_version: int | None = None
    digest: str | None
    outcome: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    amount_pico: int = 0
    day: str
    month: str
    admitted_at: datetime

    @property
    def late_id(self) -> UUID:
        """The id under which usage is written that arrives after the request was given up: always the same."""
        return uuid5(self.id, LATE)


@dataclass(frozen=True, slots=True)
class Booked:
    """`written` False: the books had a record of this request already. `epoch`: the tenant's, held while it was written;
    None if it has none yet."""

    written: bool
    epoch: int | None


@dataclass(frozen=True, slots=True)
class Known:
    """A request that the books know; `actual` None while it is open."""

    actual: Actual | None
