"""The reservations of one gateway that are open, wait for the ledger, or wait for the counters.

Invariant: from its admission until its usage is in the ledger, a request is in exactly one of `running` and `unsettled`, and
its lease is renewed. From then until the counters are updated, it is in `pending_counter_updates`.
"""

from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from loraplex.tenants.quotas.reservation import ActualUsage, LedgerUsage, Reservation, ReservedAmounts


@dataclass(frozen=True, slots=True)
class PendingSettlement:
    """A request that has ended: the row for the ledger and the use for the counters. Without an outcome it uses nothing."""

    reservation: Reservation
    row: LedgerUsage
    actual: ActualUsage


class MissingReservation(Enum):
    """What to do if the counters have no reservation of a request."""

    CHARGE = "its usage was written just now: charge it under that epoch"
    REBUILD = "its usage was written before, under an unknown epoch: only a rebuild counts it once"
    IGNORE = "no usage was written"


@dataclass(frozen=True, slots=True)
class PendingCounterUpdate:
    """The end of a request that the counters do not know yet.

    `epoch`: the tenant's epoch when the usage was written to the ledger. `reserved`: what was admitted; None if the request
    was refused. `without_counters`: it was admitted without them, so they may not have its epoch yet. `updated_at`: time of
    the first update, which may have taken effect even if no reply came.
    """

    tenant_id: UUID
    id: UUID
    actual: ActualUsage
    epoch: int | None = None
    if_missing: MissingReservation = MissingReservation.IGNORE
    reserved: ReservedAmounts | None = None
    without_counters: bool = False
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

    def leased_by_tenant(self) -> dict[UUID, list[ReservedAmounts]]:
        """The amounts whose leases are renewed in Valkey, by tenant."""
        reservations: dict[UUID, list[ReservedAmounts]] = {}
        for reservation in self.leased():
            reservations.setdefault(reservation.tenant_id, []).append(reservation.reserved)
        return reservations

    def __contains__(self, request_id: UUID) -> bool:
        return request_id in self.running or request_id in self.unsettled
