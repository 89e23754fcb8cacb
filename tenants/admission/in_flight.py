"""The reservations of one gateway that are open, wait for the ledger, or wait for the counters.

Invariant: from its admission until its usage is in the ledger, a request is in exactly one of `running` and `unsettled`, and
its lease is renewed. From then until the counters are updated, it is in `pending_counter_updates`.
"""

from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, SettledUsage


@dataclass(frozen=True, slots=True)
class PendingSettlement:
    """A request that has ended, and what it used."""

    reservation: Reservation
    usage: SettledUsage


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

    `to_rebuild`: tenants whose counters are rebuilt because too many updates waited. `active`: tenants to be reconciled,
    the longest waiting first.
    """

    running: dict[UUID, Reservation] = field(default_factory=dict)
    unsettled: dict[UUID, PendingSettlement] = field(default_factory=dict)
    pending_counter_updates: dict[UUID, PendingCounterUpdate] = field(default_factory=dict)
    to_rebuild: set[UUID] = field(default_factory=set)
    active: dict[UUID, None] = field(default_factory=dict)

    def leased(self) -> list[Reservation]:
        """All reservations whose leases this gateway renews."""
        return [*self.running.values(), *(ended.reservation for ended in self.unsettled.values())]

    def leased_by_tenant(self) -> dict[UUID, list[Reservation]]:
        """The reservations whose leases are renewed in Valkey, by tenant."""
        reservations: dict[UUID, list[Reservation]] = {}
        for reservation in self.leased():
            reservations.setdefault(reservation.tenant_id, []).append(reservation)
        return reservations

    def __contains__(self, request_id: UUID) -> bool:
        return request_id in self.running or request_id in self.unsettled
