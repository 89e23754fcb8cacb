"""What a gateway does in the background for order: finishes deletions of tenants, and deletes records past their time.

Invariant: it never ends by an error; what failed is logged and tried again. Any number of gateways may do this at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from loraplex.adapters.errors import AdaptersError
from loraplex.engine.errors import EngineError
from loraplex.platform.jobs.tenant_erasure import TenantErasure
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.retention import Retention, RetentionRepository

LOOK_S: Final = 2.0
SWEEP_S: Final = 60.0
BATCH: Final = 1000
MAX_BATCHES: Final = 50
"""Of one sweep: what is more waits for the next."""
MAX_ERASURES: Final = 10
RECENT: Final = timedelta(hours=1)
TROUBLE: Final = (TenantsError, EngineError, AdaptersError, OSError)


@dataclass(slots=True, kw_only=True)
class Housekeeping:
    """`run` until cancelled."""

    database: Database
    erasure: TenantErasure
    retention: Retention
    _forgotten: set[UUID] = field(default_factory=set)
    _log: structlog.stdlib.BoundLogger = field(
        default_factory=lambda: structlog.get_logger("loraplex.janitor")
    )

    async def run(self) -> None:
        next_sweep = 0.0
        while True:
            await self._try("deletion", self.finish_deletions)
            now = asyncio.get_running_loop().time()
            if now >= next_sweep:
                await self._try("retention", self.sweep)
                await self._try("leftovers", self.remove_leftovers)
                next_sweep = now + SWEEP_S
            await asyncio.sleep(LOOK_S)

    async def finish_deletions(self) -> None:
        """Erase what is left of deleted tenants; and here, in this gateway's engines, end what others' deletions concern."""
        async with self.database.as_operator() as session:
            deletions = TenantDeletions(session)
            unfinished = await deletions.unfinished(MAX_ERASURES)
            recent = set(await deletions.since(datetime.now(UTC) - RECENT))
        for tenant_id in recent - self._forgotten - set(unfinished):
            await self.erasure.forget(tenant_id)
            self._forgotten.add(tenant_id)
        self._forgotten &= recent
        for tenant_id in unfinished:
            await self._try("erasure", partial(self._erase, tenant_id))

    async def _erase(self, tenant_id: UUID) -> None:
        if await self.erasure.erase(tenant_id):
            self._log.info("tenant erased", tenant_id=str(tenant_id))

    async def sweep(self) -> dict[str, int]:
        """Delete what is past its time: how many rows of which table."""
        deleted: dict[str, int] = {}
        for _ in range(MAX_BATCHES):
            async with self.database.as_operator() as session:
                batch = await RetentionRepository(session, self.retention).sweep(BATCH)
            deleted = {table: deleted.get(table, 0) + count for table, count in batch.items()}
            if max(batch.values()) < BATCH:
                break
        if any(deleted.values()):
            self._log.info("records past their time deleted", **deleted)
        return deleted

    async def _try(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except TROUBLE as error:
            self._log.warning("tried again later", work=name, error=str(error)[:200])
        except Exception:  # noqa: BLE001 - reported; a defect of one kind of work must not end the others
            self._log.exception("background work failed", work=name)

    async def remove_leftovers(self) -> None:
        """What was stored for a tenant while it was deleted, or kept here of one that another gateway erased."""
        async with self.database.as_operator() as session:
            deletions = TenantDeletions(session)
            gone = set(await deletions.since(datetime.now(UTC) - RECENT))
            gone |= await deletions.deleted_among(set(await self.erasure.files.tenants()))
        for tenant_id in gone:
            await self.erasure.files.erase(tenant_id)
