"""One use case as one transaction: its change, its audit entries and the response stored for its Idempotency-Key.

Invariant: all three are committed together or not at all. The gateways are notified after the commit; a failed notification
undoes nothing.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from typing import Protocol
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository, author_behind
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RevisionMoved, StoreUnavailable
from loraplex.tenants.idempotency import RepeatableRequest, store_answer, stored_answer
from loraplex.tenants.stored_responses import EncryptedResponses, StoredResponse

LOG = structlog.get_logger("loraplex.services")


class PolicyPublisher(Protocol):
    """Notifies every gateway that a tenant's policy has changed."""

    async def publish(self, tenant_id: UUID) -> None:
        """Notify the gateways; call it after the commit. Raises `StoreUnavailable` of tenants."""
        ...


class UnitOfWork:
    """An open transaction of `actor`. `tenant_id`: the tenant whose role it has; None for the role of operators."""

    def __init__(
        self,
        session: AsyncSession,
        actor: Actor,
        tenant_id: UUID | None,
        database: Database,
        undo: ExitStack,
    ) -> None:
        self.database = database
        self.session = session
        self.actor = actor
        self.tenant_id = tenant_id
        self.audit = AuditRepository(session, actor, tenant_id)
        self._changed: set[UUID] = set()
        self._undo = undo

    @property
    def changed_tenants(self) -> set[UUID]:
        """The tenants of which the gateways are notified after the commit."""
        return self.audit.tenants | self._changed

    def notify_of(self, tenant_ids: Iterable[UUID]) -> None:
        """Notify the gateways of these tenants, too: of a change of a person's keys there, which is no entry in their log."""
        self._changed.update(tenant_ids)

    def on_rollback(self, undo: Callable[[], object]) -> None:
        """Call `undo` if the transaction does not commit: for what a change did outside of the database."""
        self._undo.callback(undo)

    async def once(
        self,
        request: RepeatableRequest,
        responses: EncryptedResponses,
        work: Callable[[], Awaitable[StoredResponse]],
    ) -> StoredResponse:
        """Return the response stored for the same request, else store and return that of `work`.

        Raises `IdempotencyInUse` while the first one runs, `IdempotencyMismatch` when another request had the key,
        `StoredResponseUnreadable`. An error of `work` is not stored: the same key may be used again.
        """
        stored = await stored_answer(self.session, request)
        if stored is not None:
            return responses.decrypt(request, stored)
        response = await work()
        sealed = responses.encrypt(request, response)
        await store_answer(self.session, request, response.status, sealed, responses.lifetime)
        return response


@asynccontextmanager
async def unit_of_work(
    database: Database, actor: Actor, tenant_id: UUID | None, publisher: PolicyPublisher | None
) -> AsyncIterator[UnitOfWork]:
    """Open a transaction in the role of `tenant_id`, or of operators for None. It commits at the end of the block; an error
    rolls everything back. Where `actor` is a key of the console's pages, the author is the person who has it.

    After the commit, `publisher` notifies the gateways of every changed tenant; None: no gateway runs.
    """
    transaction = database.as_operator() if tenant_id is None else database.as_tenant(tenant_id)
    with ExitStack() as undo:
        async with transaction as session:
            work = UnitOfWork(session, await author_behind(session, actor), tenant_id, database, undo)
            yield work
        undo.pop_all()
    if publisher is not None:
        for changed in work.changed_tenants:
            await _publish(publisher, changed)


async def _publish(publisher: PolicyPublisher, tenant_id: UUID) -> None:
    """A failure is logged only: the change is committed, and a gateway that misses the notification learns of it when its
    cached key expires.
    """
    try:
        await publisher.publish(tenant_id)
    except StoreUnavailable as error:
        LOG.warning("policy change not published", tenant_id=str(tenant_id), reason=str(error))


def require_revision(seen: int | None, present: int) -> None:
    """Compare the revision that the author of a change has seen, None for any, with that of the row. Raises `RevisionMoved`.

    Read `present` under a lock that lasts until the commit.
    """
    if seen is not None and seen != present:
        raise RevisionMoved("It has changed since it was read: read it again, then repeat the change.")
