"""`UploadLease`: a short lease of one request on an upload, renewed while the request runs.

Invariant: a request that could not renew in time is stopped before the lease ends, and never ends an upload that
another request has leased since.
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
    """The lease of an upload, taken for `lease_s` after `began`, a time of the event loop."""

    def __init__(self, database: Database, upload: Upload, lease_s: float, began: float) -> None:
        self._database = database
        self._upload = upload
        self._lease_s = lease_s
        self._began = began
        self._is_lost = False
        self.ends: set[datetime] = {upload.claimed_until} if upload.claimed_until else set()
        """The end times that this lease has written: the row has one of them until another request takes the lease."""

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew the lease while the context is open.

        Raises `UploadClaimed` if another request may have the lease, `DatabaseUnavailable` if it could not be renewed
        in time.
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
            raise DatabaseUnavailable("the upload's lease could not be renewed in time; try again") from error

    async def _renew(self, bound: asyncio.Timeout) -> None:
        clock, began = asyncio.get_running_loop(), self._began
        while True:
            await asyncio.sleep(max(0.0, began + self._lease_s / RENEWALS_PER_LEASE - clock.time()))
            began, end = clock.time(), datetime.now(UTC) + timedelta(seconds=self._lease_s)
            try:
                async with self._database.as_tenant(self._upload.tenant_id) as session:
                    uploads = UploadRepository(session, self._upload.tenant_id)
                    # Add it before the commit, whose reply may be lost.
                    self.ends.add(end)
                    await uploads.renew(self._upload.id, self.ends, end)
            except StoreUnavailable as error:
                LOG.warning("an upload's lease was not renewed", reason=str(error))
            except (Conflict, NotFound):
                # The upload has ended, perhaps by this request, or another request has the lease.
                self._is_lost = True
                return
            except Exception:
                # Logged; one unexpected error must not end a lease that the next attempt can renew.
                LOG.exception("an upload's lease was not renewed")
            else:
                if not bound.expired():
                    bound.reschedule(began + self._lease_s)
