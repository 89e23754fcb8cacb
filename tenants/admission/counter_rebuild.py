"""Seeds lost or outdated counters from the books, so that few gateways do it at the same time.

Invariant: the lock only saves work; two that seed at once take two epochs, and the counters keep the later one.
"""

import asyncio
from uuid import UUID

from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.valkey import ANSWER_SECONDS, FAILURES, Valkey, tenant_key

LOCK_MILLISECONDS = 500


class CounterRebuild:
    """Of all tenants of one gateway: one seeding at a time for each."""

    def __init__(self, books: UsageLedger, counters: Counters, redis: Valkey, gateway_id: UUID) -> None:
        self._books = books
        self._counters = counters
        self._redis = redis
        self._gateway = str(gateway_id)
        self._running: dict[UUID, asyncio.Task[int]] = {}

    async def try_seed(self, tenant_id: UUID) -> bool:
        """Seeds unless another gateway is at it, or somebody has since the caller asked: seeding reads all of a tenant.

        Raises `ValkeyUnavailable`, `DatabaseUnavailable`.
        """
        if tenant_id in self._running:
            await self.seed(tenant_id)
            return True
        if not await self._locked(tenant_id):
            return False
        if not await self._is_seeded(tenant_id):
            await self.seed(tenant_id)
        return True

    async def seed(self, tenant_id: UUID) -> int:
        """The epoch in force, with all that is in the books. Raises `ValkeyUnavailable`, `DatabaseUnavailable`."""
        task = self._running.get(tenant_id)
        if task is None or task.done():
            task = self._running[tenant_id] = asyncio.create_task(self._seed(tenant_id))
            task.add_done_callback(lambda ended: self._forget(tenant_id, ended))
        return await asyncio.shield(task)

    def _forget(self, tenant_id: UUID, ended: "asyncio.Task[int]") -> None:
        if self._running.get(tenant_id) is ended:
            del self._running[tenant_id]

    async def _seed(self, tenant_id: UUID) -> int:
        """Counters may be ahead of books that were restored from a backup: then the books skip what they do not know of."""
        epoch, seed = await self._books.seed(tenant_id)
        in_force = await self._counters.seed(tenant_id, epoch, seed)
        if in_force > epoch and in_force > await self._books.epoch(tenant_id):
            epoch, seed = await self._books.seed(tenant_id, above=in_force)
            in_force = await self._counters.seed(tenant_id, epoch, seed)
        return in_force

    async def _is_seeded(self, tenant_id: UUID) -> bool:
        """Whether counters and books have the same epoch."""
        counted = (await self._counters.heartbeat(tenant_id, ())).epoch
        return counted is not None and counted == await self._books.epoch(tenant_id)

    async def _locked(self, tenant_id: UUID) -> bool:
        """The lock is not given back: those who come late within its time have nothing to look up."""
        key = tenant_key(tenant_id, "seeding")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return bool(await self._redis.set(key, self._gateway, nx=True, px=LOCK_MILLISECONDS))
        except (*FAILURES, TimeoutError) as error:
            raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error
