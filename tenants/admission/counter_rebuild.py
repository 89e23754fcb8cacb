"""Rebuilds lost or outdated counters from the ledger, mostly in one gateway at a time.

Invariant: the lock only saves work. Two rebuilds at once take two epochs, and the counters keep the later one.
"""

import asyncio
from functools import partial
from uuid import UUID

from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.single_flight import SingleFlight
from loraplex.tenants.valkey import ANSWER_SECONDS, FAILURES, Valkey, tenant_key

LOCK_MILLISECONDS = 500


class CounterRebuild:
    """The rebuilds of one gateway: one at a time per tenant."""

    def __init__(self, ledger: UsageLedger, counters: Counters, redis: Valkey, gateway_id: UUID) -> None:
        self._ledger = ledger
        self._counters = counters
        self._redis = redis
        self._gateway = str(gateway_id)
        # A rebuild that has begun serves the requests that come next.
        self._rebuilds = SingleFlight[int](cancels=False)

    async def try_rebuild(self, tenant_id: UUID) -> bool:
        """Rebuild unless another gateway is doing so or has just done so, since a rebuild reads all of a tenant's totals.

        Returns False if another gateway has the lock. Raises `ValkeyUnavailable`, `DatabaseUnavailable`.
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
        """Rebuild from all that is in the ledger; return the epoch in force. Raises `ValkeyUnavailable`, `DatabaseUnavailable`."""
        return await self._rebuilds.run(tenant_id, partial(self._rebuild, tenant_id))

    async def _rebuild(self, tenant_id: UUID) -> int:
        """Rebuild once; again under a higher epoch if the counters are ahead of a ledger restored from a backup."""
        epoch, snapshot = await self._ledger.take_snapshot(tenant_id)
        in_force = await self._counters.rebuild(tenant_id, epoch, snapshot)
        if in_force > epoch and in_force > await self._ledger.epoch(tenant_id):
            epoch, snapshot = await self._ledger.take_snapshot(tenant_id, above=in_force)
            in_force = await self._counters.rebuild(tenant_id, epoch, snapshot)
        return in_force

    async def _is_current(self, tenant_id: UUID) -> bool:
        """Whether counters and ledger have the same epoch."""
        counted = (await self._counters.heartbeat(tenant_id, ())).epoch
        return counted is not None and counted == await self._ledger.epoch(tenant_id)

    async def _locked(self, tenant_id: UUID) -> bool:
        """Take the lock. It is left to expire, so that late callers within its time do not look anything up."""
        key = tenant_key(tenant_id, "seeding")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return bool(await self._redis.set(key, self._gateway, nx=True, px=LOCK_MILLISECONDS))
        except (*FAILURES, TimeoutError) as error:
            raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error
