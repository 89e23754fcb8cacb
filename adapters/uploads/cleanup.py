"""Removes what uploads leave behind: expired sessions, parts of ended uploads, and files of dead processes.

Every gateway runs one. Several may run each step at once; the next round removes what one leaves.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog

from loraplex.adapters.errors import AdaptersError
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.registry.uploads import ExpiredUploads

LOG = structlog.get_logger("loraplex.uploads")

ROUND_SECONDS: Final = 30.0
ROUNDS_PER_SWEEP: Final = 120
"""A sweep lists all stored parts: once an hour, and at the start."""
UPLOADS_AT_ONCE: Final = 100
ENDED_KEPT: Final = timedelta(days=7)
ABANDONED_AFTER_SECONDS: Final = 2 * 86_400.0
"""Longer than any file takes to be written: for files whose names tell no process."""


class UploadCleanup:
    """Cleans up the uploads of all tenants, on one gateway."""

    def __init__(self, database: Database, parts: UploadParts, storage: LocalAdapterStore) -> None:
        self._database = database
        self._parts = parts
        self._storage = storage

    async def run(self) -> None:
        """Run rounds until cancelled; a failed round is logged and the next one retries."""
        done = 0
        while True:
            try:
                await self.end_overdue()
                if done % ROUNDS_PER_SWEEP == 0:
                    await self.sweep()
            except (TenantsError, AdaptersError, OSError) as error:
                LOG.warning("uploads were not cleaned up", reason=str(error))
            except Exception:
                # Logged; one unexpected error must not keep uploads open for ever.
                LOG.exception("cleaning up uploads failed")
            done += 1
            await asyncio.sleep(ROUND_SECONDS)

    async def end_overdue(self) -> None:
        """Expire uploads, and delete the recorded parts of ended ones."""
        async with self._database.as_operator() as session:
            expired = ExpiredUploads(session)
            await expired.expire()
            ended = await expired.ended_with_parts(UPLOADS_AT_ONCE)
        for upload in ended:
            await self._parts.delete_upload(upload.tenant_id, upload.id)
            async with self._database.as_operator() as session:
                await ExpiredUploads(session).forget_parts(upload.id)

    async def sweep(self) -> None:
        """Delete parts without a row, files of dead processes, and the rows of uploads ended long ago."""
        # List parts first: an upload that begins later has no part among them.
        stored = await self._parts.uploads()
        async with self._database.as_operator() as session:
            expired = ExpiredUploads(session)
            alive = await expired.open_among(upload_id for _, upload_id in stored)
            await expired.forget_ended(datetime.now(UTC) - ENDED_KEPT)
        for tenant_id, upload_id in stored:
            if upload_id not in alive:
                await self._parts.delete_upload(tenant_id, upload_id)
        left = await self._parts.remove_abandoned(ABANDONED_AFTER_SECONDS)
        left |= await on_thread(self._storage.remove_abandoned, ABANDONED_AFTER_SECONDS)
        if left:
            LOG.warning(
                "half-written adapters of ended processes were removed",
                files=sorted(left),
                bytes=sum(left.values()),
            )
