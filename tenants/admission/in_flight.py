"""What this gateway has admitted and not settled, and what has ended but is not yet in the books or in the counters.

Invariant: from its admission until it is in the books, a request is in exactly one of `running` and `unbooked`, and its
lease is renewed; from then until the counters know, it is in `uncounted`.
"""

from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from loraplex.tenants.quotas.reservation import ActualUsage, LedgerUsage, Reservation, ReservedAmounts


@dataclass(frozen=True, slots=True)
class PendingSettlement:
    """A request that has ended: what is to be written and counted. Without an outcome it counts for nothing."""

    admission: Reservation
    row: LedgerUsage
    actual: ActualUsage


class MissingReservation(Enum):
    """What is to be done where the counters hold nothing for a request."""

    CHARGE = "it was written just now: counted under that epoch"
    SEED = "it had been written before, nobody knows under which epoch: only a seeding counts it once"
    LEAVE = "nothing was written"


@dataclass(frozen=True, slots=True)
class PendingCounterUpdate:
    """What the counters are still to be told. `epoch`: the tenant's when it was written into the books; `hold`: as which it
    was admitted, None if it was refused. `met`: it was admitted without the counters, which may not have its epoch yet.
    `told_at`: when they were first told, which may have happened although no answer came.
    """

    tenant_id: UUID
    id: UUID
    actual: ActualUsage
    epoch: int | None = None
    unheld: MissingReservation = MissingReservation.LEAVE
    hold: ReservedAmounts | None = None
    met: bool = False
    told_at: float | None = None


@dataclass(slots=True)
class InFlightReservations:
    """`reseed`: tenants whose counters are to be seeded anew, because too much was to be told to them. `active`: those to be
    compared with the books, whoever waits longest first.
    """

    running: dict[UUID, Reservation] = field(default_factory=dict)
    unbooked: dict[UUID, PendingSettlement] = field(default_factory=dict)
    uncounted: dict[UUID, PendingCounterUpdate] = field(default_factory=dict)
    reseed: set[UUID] = field(default_factory=set)
    active: dict[UUID, None] = field(default_factory=dict)

    def vouched_for(self) -> list[Reservation]:
        return [*self.running.values(), *(ended.admission for ended in self.unbooked.values())]

    def holds(self) -> dict[UUID, list[ReservedAmounts]]:
        """By tenant, what Valkey's leases are renewed for."""
        holds: dict[UUID, list[ReservedAmounts]] = {}
        for admission in self.vouched_for():
            holds.setdefault(admission.tenant_id, []).append(admission.hold)
        return holds

    def __contains__(self, request_id: UUID) -> bool:
        return request_id in self.running or request_id in self.unbooked
