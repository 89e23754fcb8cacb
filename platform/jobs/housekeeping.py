"""Housekeeping of a gateway: finishes the deletion of tenants, deletes records whose retention has ended, and makes the
partitions of the ledger.

Invariant: an error never ends it; a failed step is logged and repeated. Any number of gateways may run it at once.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import structlog

from loraplex.adapters.errors import AdaptersError
from loraplex.engine.errors import EngineError
from loraplex.platform.jobs.tenant_erasure import TenantErasure
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.ledger.partitions import LedgerPartitions
from loraplex.tenants.repetition import attempt
from loraplex.tenants.retention import Retention, RetentionRepository

DELETION_POLL_S: Final = 2.0
SWEEP_S: Final = 60.0
BATCH: Final = 1000
MAX_BATCHES: Final = 50
"""Batches of one sweep; further rows wait for the next sweep."""
MAX_ERASURES: Final = 10
RECENT: Final = timedelta(hours=1)
RETRIED_ERRORS: Final = (TenantsError, EngineError, AdaptersError, OSError)
LOG = structlog.get_logger("loraplex.housekeeping")


@dataclass(slots=True, kw_only=True)
class Housekeeping:
    """Background jobs of one gateway; `run` runs until it is cancelled."""

    database: Database
    erasure: TenantErasure
    retention: Retention
    partitions: LedgerPartitions
    _forgotten: set[UUID] = field(default_factory=set)

    async def run(self) -> None:
        next_sweep = 0.0
        while True:
            await _attempt("deletion", self.finish_deletions())
            now = asyncio.get_running_loop().time()
            if now >= next_sweep:
                await _attempt("partitions", self.partitions.keep_up())
                await _attempt("retention", self.sweep())
                await _attempt("leftovers", self.remove_leftovers())
                next_sweep = now + SWEEP_S
            await asyncio.sleep(DELETION_POLL_S)

    async def finish_deletions(self) -> None:
        """Erase the rest of deleted tenants, and end requests of tenants in this gateway's engines that another gateway erased."""
        async with self.database.as_operator() as session:
            deletions = TenantDeletions(session)
            unfinished = await deletions.unfinished(MAX_ERASURES)
            recent = set(await deletions.since(datetime.now(UTC) - RECENT))
        for tenant_id in recent - self._forgotten - set(unfinished):
            await self.erasure.forget(tenant_id)
            self._forgotten.add(tenant_id)
        self._forgotten &= recent
        for tenant_id in unfinished:
            await _attempt("erasure", self._erase(tenant_id))

    async def _erase(self, tenant_id: UUID) -> None:
        if await self.erasure.erase(tenant_id):
            LOG.info("tenant erased", tenant_id=str(tenant_id))

    async def sweep(self) -> dict[str, int]:
        """Delete records whose retention has ended. Returns the number of rows per table."""
        deleted: dict[str, int] = {}
        for _ in range(MAX_BATCHES):
            async with self.database.as_operator() as session:
                batch = await RetentionRepository(session, self.retention).sweep(BATCH)
            deleted = {table: deleted.get(table, 0) + count for table, count in batch.items()}
            if max(batch.values()) < BATCH:
                break
        if any(deleted.values()):
            LOG.info("expired records deleted", **deleted)
        return deleted

    async def remove_leftovers(self) -> None:
        """Erase files that were stored while their tenant was being deleted, or that are here of a tenant another gateway erased."""
        async with self.database.as_operator() as session:
            deletions = TenantDeletions(session)
            gone = set(await deletions.since(datetime.now(UTC) - RECENT))
            gone |= await deletions.deleted_among(set(await self.erasure.files.tenants()))
        for tenant_id in gone:
            await self.erasure.files.erase(tenant_id)


async def _attempt(name: str, work: Awaitable[object]) -> None:
    """A defect in one job does not end the others."""
    await attempt(LOG, work, "background work failed", RETRIED_ERRORS, work=name)
