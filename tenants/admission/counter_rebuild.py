"""Rebuilds lost or outdated counters from the ledger, mostly in one gateway at a time.

Invariant: the lock only saves work. Two rebuilds at once take two epochs, and the counters keep the later one.
"""

import asyncio
from functools import partial
from uuid import UUID

from redis.asyncio import Redis

from loraplex.tenants.admission.fences import Fences
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import QuotaUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.single_flight import SingleFlight
from loraplex.tenants.valkey import ANSWER_SECONDS, FAILURES, tenant_key

# A rebuild waits for the other gateways, which see its fence a quarter of a second later.
LOCK_MILLISECONDS = 2000
TRIES = 3


class CounterRebuild:
    """The rebuilds of one gateway: one at a time per tenant."""

    def __init__(
        self, ledger: UsageLedger, counters: Counters, fences: Fences, redis: Redis, gateway_id: UUID
    ) -> None:
        self._ledger = ledger
        self._fences = fences
        self._counters = counters
        self._redis = redis
        self._gateway = str(gateway_id)
        # A rebuild that has begun serves the requests that come next.
        self._rebuilds = SingleFlight[int](cancels=False)

    async def try_rebuild(self, tenant_id: UUID) -> bool:
        """Rebuild unless another gateway is doing so or has just done so, since a rebuild reads all of a tenant's totals.

        Returns False if another gateway has the lock. Raises as `rebuild`.
        """
        if tenant_id in self._rebuilds:
            await self.rebuild(tenant_id)
            return True
        if not await self._locked(tenant_id):
            return False
        if not await self._is_current(tenant_id):
            await self.rebuild(tenant_id)
        return True

    async def rebuild(self, tenant_id: UUID) -> int:
        """Rebuild from all that is in the ledger; return the epoch in force.

        Raises `ValkeyUnavailable`, `CountersNewer`, `DatabaseUnavailable`, and `QuotaUnavailable` while a gateway does not ship
        its journal.
        """
        return await self._rebuilds.run(tenant_id, partial(self._rebuild, tenant_id))

    async def _rebuild(self, tenant_id: UUID) -> int:
        """Rebuild once; again under a higher epoch if the counters are ahead of a ledger restored from a backup."""
        # Counters that this gateway may not replace are not outdated by its fence.
        await self._counters.heartbeat(tenant_id, ())
        epoch, in_force = await self._rebuild_above(tenant_id, 0)
        if in_force > epoch and in_force > await self._ledger.epoch(tenant_id):
            _, in_force = await self._rebuild_above(tenant_id, in_force)
        return in_force

    async def _rebuild_above(self, tenant_id: UUID, above: int) -> tuple[int, int]:
        """Rebuild behind a fence, with another one if a rebuild of another gateway came in between.

        Returns the epoch taken and the epoch in force.
        """
        for _ in range(TRIES):
            fence = await self._fences.raise_fence(tenant_id, above=above)
            taken = await self._ledger.take_snapshot(fence)
            if taken is not None:
                return taken[0], await self._counters.rebuild(tenant_id, *taken)
        raise QuotaUnavailable("other gateways rebuild the counters of this tenant; try again")

    async def _is_current(self, tenant_id: UUID) -> bool:
        """Whether counters and ledger have the same epoch, which no fence has outdated."""
        counted = (await self._counters.heartbeat(tenant_id, ())).epoch
        if counted is None or self._fences.outdated(tenant_id, counted):
            return False
        return counted == await self._ledger.epoch(tenant_id)

    async def _locked(self, tenant_id: UUID) -> bool:
        """Take the lock. It is left to expire, so that late callers within its time do not look anything up."""
        key = tenant_key(tenant_id, "seeding")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return bool(await self._redis.set(key, self._gateway, nx=True, px=LOCK_MILLISECONDS))
        except (*FAILURES, TimeoutError) as error:
            raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error
