"""Gives up what nobody vouches for: requests of gateways that died, and what was admitted and never reserved.

Invariant: only a gateway that itself could renew its leases for a whole lease gives up those of others, so that an outage
of a store or of a whole machine, which lets all leases run out together, kills no running request.
"""

import time
from collections.abc import Callable
from uuid import UUID

import structlog

from loraplex.tenants.admission.in_flight import InFlightReservations
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import NOTHING_USED

LOG = structlog.get_logger("loraplex.reaper")


class Reaper:
    """Of one gateway, for all tenants. `overdue` are tenants whose counters have leases that ran out."""

    def __init__(
        self,
        books: UsageLedger,
        counters: Counters,
        requests: InFlightReservations,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.overdue: set[UUID] = set()
        self._books = books
        self._counters = counters
        self._requests = requests
        self._lease_s = lease_s
        self._clock = clock
        self._renewing_since: float | None = None
        self._look_until: dict[UUID, float] = {}
        self._renewed_at = 0.0

    def renewed(self) -> None:
        """This gateway has just renewed its leases in both stores."""
        if self._renewing_since is None or self._stood_still():
            self._renewing_since = self._clock()
        self._renewed_at = self._clock()

    def failed_to_renew(self) -> None:
        self._renewing_since = None

    async def reap(self) -> int:
        """How many requests were given up. Raises `StoreUnavailable`."""
        if self._renewing_since is None or self._stood_still():
            return 0
        if self._clock() - self._renewing_since < self._lease_s:
            return 0
        given_up = await self._give_up()
        for tenant_id in [*self.overdue]:
            done = await self._release_expired(tenant_id)
            if done and self._clock() >= self._look_until.get(tenant_id, 0.0):
                self._look_until.pop(tenant_id, None)
                self.overdue.discard(tenant_id)
        return given_up

    def _stood_still(self) -> bool:
        return self._clock() - self._renewed_at > self._lease_s

    async def _give_up(self) -> int:
        """What the books have open and nobody renews: nobody knows what became of it, and nothing is charged."""
        rows = [row for row in await self._books.take_expired(self._lease_s) if row.id not in self._requests]
        for row in rows:
            LOG.warning("a request was given up", admission=str(row.id), tenant=str(row.tenant_id))
            await self._books.settle(row)
            # Counters that were seeded meanwhile gave it a whole lease again, and nobody may come who tells of its end.
            self._look_until[row.tenant_id] = self._clock() + self._lease_s
            self.overdue.add(row.tenant_id)
        return len(rows)

    async def _release_expired(self, tenant_id: UUID) -> bool:
        """Ends leases that ran out, with what the books say was used. Returns whether none is left to look at again."""
        expired = [each for each in await self._counters.expired(tenant_id) if each not in self._requests]
        known = await self._books.known(expired) if expired else {}
        done = True
        for request_id in expired:
            record = known.get(request_id)
            if record is not None and record.actual is None:
                done = False
                continue
            actual = NOTHING_USED if record is None or record.actual is None else record.actual
            await self._counters.reap(tenant_id, request_id, actual)
        return done
