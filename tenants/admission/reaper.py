"""Releases reservations whose lease has expired: of gateways that died, and of requests that never reached the ledger.

Invariants: a gateway reaps only after it could renew its own leases for a whole lease, since an outage of a store or of a machine
or a jump of PostgreSQL's clock lets all leases expire together. No usage is written or lost: the journal of the dead gateway has it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import structlog

from loraplex.tenants.admission.fences import Fences
from loraplex.tenants.admission.in_flight import InFlightReservations
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import CountersNewer
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import NOTHING_USED

LOG = structlog.get_logger("loraplex.reaper")


@dataclass(eq=False)
class Reaper:
    """The reaper of one gateway, for all tenants. `overdue`: tenants whose counters have expired leases."""

    ledger: UsageLedger
    counters: Counters
    requests: InFlightReservations
    fences: Fences
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    overdue: set[UUID] = field(default_factory=set)
    _renewing_since: float | None = None
    _look_until: dict[UUID, float] = field(default_factory=dict)
    _renewed_at: float = 0.0

    def renewed(self) -> None:
        """Note that this gateway has just renewed its leases in both stores."""
        if self._renewing_since is None or self._stood_still():
            self._renewing_since = self.clock()
        self._renewed_at = self.clock()

    def failed_to_renew(self) -> None:
        """Note that a renewal has failed: reaping waits for another whole lease."""
        self._renewing_since = None

    async def reap(self) -> int:
        """Give up expired requests and return their number. Raises `StoreUnavailable`."""
        if self._renewing_since is None or self._stood_still():
            return 0
        if self.clock() - self._renewing_since < self.lease_s:
            return 0
        before = await self.fences.leases_end_before()
        if before is None:
            return 0
        given_up = await self._give_up(before)
        for tenant_id in [*self.overdue]:
            try:
                done = await self._end_expired(tenant_id)
            except CountersNewer:
                done = True
            if done and self.clock() >= self._look_until.get(tenant_id, 0.0):
                self._look_until.pop(tenant_id, None)
                self.overdue.discard(tenant_id)
        return given_up

    def _stood_still(self) -> bool:
        return self.clock() - self._renewed_at > self.lease_s

    async def _give_up(self, before: datetime) -> int:
        """Remove reservations of the ledger whose lease has expired; no usage is written."""
        expired = await self.ledger.take_expired(before, self.lease_s)
        given_up = [each for each in expired if each.id not in self.requests]
        for each in given_up:
            LOG.warning("a request was given up", admission=str(each.id), tenant=str(each.tenant_id))
            await self.ledger.settle(each, NOTHING_USED)
            # Counters rebuilt meanwhile gave it a whole lease again. Its gateway may be dead and never report its end.
            self._look_until[each.tenant_id] = self.clock() + self.lease_s
            self.overdue.add(each.tenant_id)
        return len(given_up)

    async def _end_expired(self, tenant_id: UUID) -> bool:
        """End expired leases in the counters with the use that the ledger has. Return whether none is left to check again."""
        expired = [each for each in await self.counters.expired(tenant_id) if each not in self.requests]
        known = await self.ledger.known(expired) if expired else {}
        done = True
        for request_id in expired:
            usage = known.get(request_id, NOTHING_USED)
            if usage is None:
                done = False
                continue
            await self.counters.reap(tenant_id, request_id, usage)
        return done
