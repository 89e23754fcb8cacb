"""`UploadLease`: one request's hold on an upload, a short lease that it renews while it lives.

Invariant: who could not renew in time is stopped before the lease ends, and ends no upload that another has claimed since.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import structlog

from loraplex.tenants.database import Database
from loraplex.tenants.errors import Conflict, DatabaseUnavailable, NotFound, StoreUnavailable, UploadClaimed
from loraplex.tenants.models import Upload
from loraplex.tenants.registry.uploads import UploadRepository

LOG = structlog.get_logger("loraplex.uploads")

RENEWALS_PER_LEASE = 3


class UploadLease:
    """Of an upload that was claimed for `lease_s` after `began`, a time of the event loop."""

    def __init__(self, database: Database, upload: Upload, lease_s: float, began: float) -> None:
        self._database = database
        self._upload = upload
        self._lease_s = lease_s
        self._began = began
        self._is_lost = False
        self.ends: set[datetime] = {upload.claimed_until} if upload.claimed_until else set()
        """The times this claim has written: what the row says is one of them while nobody else has claimed."""

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renews meanwhile. In place of going on with a claim that may be another's, it raises `UploadClaimed`, or
        `DatabaseUnavailable` where nobody could tell in time.
        """
        bound = asyncio.timeout_at(self._began + self._lease_s)
        try:
            async with bound:
                renewing = asyncio.create_task(self._renew(bound))
                try:
                    yield
                finally:
                    renewing.cancel()
                    await asyncio.gather(renewing, return_exceptions=True)
        except TimeoutError as error:
            if not bound.expired():
                raise
            if self._is_lost:
                raise UploadClaimed("the upload could not be kept; try again") from error
            raise DatabaseUnavailable("the upload's claim could not be renewed in time; try again") from error

    async def _renew(self, bound: asyncio.Timeout) -> None:
        clock, began = asyncio.get_running_loop(), self._began
        while True:
            await asyncio.sleep(max(0.0, began + self._lease_s / RENEWALS_PER_LEASE - clock.time()))
            began, end = clock.time(), datetime.now(UTC) + timedelta(seconds=self._lease_s)
            try:
                async with self._database.as_tenant(self._upload.tenant_id) as session:
                    uploads = UploadRepository(session, self._upload.tenant_id)
                    # Before the commit, whose answer may be lost.
                    self.ends.add(end)
                    await uploads.renew(self._upload.id, self.ends, end)
            except StoreUnavailable as error:
                LOG.warning("an upload's claim was not renewed", reason=str(error))
            except (Conflict, NotFound):
                # Ended, which the request itself may have done; or another's, and then it can end nothing.
                self._is_lost = True
                return
            except Exception:
                # Reported; a defect met once must not end a claim that the next try can keep.
                LOG.exception("an upload's claim was not renewed")
            else:
                if not bound.expired():
                    bound.reschedule(began + self._lease_s)
