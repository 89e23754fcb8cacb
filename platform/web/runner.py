"""Runs the queries and use cases of keys and sessions: each in one transaction, one database role and one slot of its tenant.

Invariant: a change that is sent twice with one key runs once. Its result is stored, encrypted, in the transaction of the change.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import timedelta
from typing import Concatenate, Final, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter
from loraplex.tenants.actors import Actor
from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.stored_responses import EncryptedResponses, StoredResponse
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

P = ParamSpec("P")
T = TypeVar("T")
IDEMPOTENCY_LIFETIME: Final = timedelta(hours=24)
"""How long the response to an `Idempotency-Key` is stored, encrypted."""


class Runner:
    """Runs the work of one application. `work` names its requests in error messages, in the plural."""

    def __init__(self, dependencies: GatewayDependencies, work: str) -> None:
        self._database = dependencies.database
        self._publisher = dependencies.policy_publisher
        self._limiter = TenantLimiter(work, per_tenant=AT_ONCE, waiting=MAX_WAITING)
        self._responses = EncryptedResponses(dependencies.derive_key, IDEMPOTENCY_LIFETIME)

    def slot(self, tenant_id: UUID | None) -> AbstractAsyncContextManager[None]:
        """Take one of the tenant's slots; an operator needs none. Raises `Overloaded`, `ShareExceeded`."""
        return nullcontext() if tenant_id is None else self._limiter.slot(tenant_id)

    def session(self, tenant_id: UUID | None) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a transaction that changes nothing, in the role of the tenant, or of operators for None; in a slot that was taken."""
        database = self._database
        return database.as_operator() if tenant_id is None else database.as_tenant(tenant_id)

    @asynccontextmanager
    async def reading(self, tenant_id: UUID | None) -> AsyncIterator[AsyncSession]:
        """Take a slot, and open a transaction as `session`."""
        async with self.slot(tenant_id), self.session(tenant_id) as session:
            yield session

    async def query(
        self,
        tenant_id: UUID | None,
        find: Callable[Concatenate[AsyncSession, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return what `find` reads in a transaction of its own."""
        async with self.reading(tenant_id) as session:
            return await find(session, *args, **kwargs)

    @asynccontextmanager
    async def unit_of_work(self, actor: Actor, tenant_id: UUID | None) -> AsyncIterator[UnitOfWork]:
        """Open a unit of work of `actor` in a slot, which commits at the end of the block."""
        async with (
            self.slot(tenant_id),
            unit_of_work(self._database, actor, tenant_id, self._publisher) as uow,
        ):
            yield uow

    async def change(
        self,
        actor: Actor,
        tenant_id: UUID | None,
        repeatable: RepeatableRequest | None,
        work: Callable[[UnitOfWork], Awaitable[StoredResponse]],
    ) -> StoredResponse:
        """Return the result of `work` after its commit, or the one that is stored for the same `repeatable` request.

        Raises `IdempotencyInUse`, `IdempotencyMismatch`, `StoredResponseUnreadable` of tenants.
        """
        async with self.unit_of_work(actor, tenant_id) as uow:
            if repeatable is None:
                return await work(uow)
            return await uow.once(repeatable, self._responses, lambda: work(uow))
