"""The requests of one gateway that run, that PostgreSQL does not know to have ended, or that the counters wait for.

Invariant: from its admission until its end is shipped, a request is in exactly one of `running`, `unsettled` and `early`. Its
lease is renewed until the counters or the ledger know its end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, SettledUsage


@dataclass(slots=True)
class RunningRequest:
    """An admitted request. `used_so_far` reads what it has used; None where that is unknown until its end."""

    reservation: Reservation
    used_so_far: Callable[[], SettledUsage] | None = None
    journaled: SettledUsage = NOTHING_USED


@dataclass(slots=True)
class PendingSettlement:
    """A request that has ended, and what it used.

    `updated_at`: time of the counters' first update, which may have taken effect even if no reply came.
    """

    reservation: Reservation
    usage: SettledUsage
    updated_at: float | None = None


class MissingReservation(Enum):
    """What to do if the counters have no reservation of a request."""

    CHARGE = "its usage was written just now: charge it under that epoch"
    REBUILD = "its usage was written before, under an unknown epoch: only a rebuild counts it once"
    IGNORE = "no usage was written"


@dataclass(frozen=True, slots=True)
class PendingCounterUpdate:
    """The end of a request that the counters do not know yet.

    `reservation` is None if the request was refused. `epoch`: the tenant's epoch when the usage was written to the ledger.
    `updated_at`: time of the first update, which may have taken effect even if no reply came.
    """

    tenant_id: UUID
    id: UUID
    reservation: Reservation | None = None
    usage: SettledUsage = NOTHING_USED
    epoch: int | None = None
    if_missing: MissingReservation = MissingReservation.IGNORE
    updated_at: float | None = None


@dataclass(slots=True)
class InFlightReservations:
    """The reservations of one gateway, and what still waits for a store.

    `early`: requests whose end the counters know and the ledger does not, with the epoch of these counters. `to_rebuild`:
    tenants whose counters are rebuilt because too many updates waited. `active`: tenants to be reconciled, the longest
    waiting first.
    """

    running: dict[UUID, RunningRequest] = field(default_factory=dict)
    unsettled: dict[UUID, PendingSettlement] = field(default_factory=dict)
    early: dict[UUID, int] = field(default_factory=dict)
    pending_counter_updates: dict[UUID, PendingCounterUpdate] = field(default_factory=dict)
    to_rebuild: set[UUID] = field(default_factory=set)
    active: dict[UUID, None] = field(default_factory=dict)

    def leased(self) -> list[Reservation]:
        """All reservations whose leases this gateway renews."""
        running = [each.reservation for each in self.running.values()]
        return running + [ended.reservation for ended in self.unsettled.values()]

    def leased_by_tenant(self) -> dict[UUID, list[Reservation]]:
        """The reservations whose leases are renewed in Valkey, by tenant."""
        reservations: dict[UUID, list[Reservation]] = {}
        for reservation in self.leased():
            reservations.setdefault(reservation.tenant_id, []).append(reservation)
        return reservations

    def __contains__(self, request_id: UUID) -> bool:
        return request_id in self.running or request_id in self.unsettled or request_id in self.early
