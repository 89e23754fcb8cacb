"""Runs one request of the tenant or operator plane: one transaction, its audit rows, and its response.

Invariant: a change, its audit rows and the response stored for its Idempotency-Key are committed together or not at all;
the gateways are notified after the commit.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import timedelta
from typing import Final, Literal, TypeAlias, TypeVar
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.api.management.idempotent_responses import EncryptedResponses
from loraplex.platform.api.management.pagination import Cursors, Page, page_of
from loraplex.platform.api.management.request_bodies import body_sha256
from loraplex.platform.api.management.responses import ApiResponse, ResponseModel, respond
from loraplex.platform.api.management.sorting import KeyT, RowT, SortOrder
from loraplex.platform.api.request_id import request_id_of
from loraplex.platform.auth.authenticator import Caller, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter
from loraplex.tenants.audit_log import Actor, AuditRepository
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.idempotency import IdempotencyRepository, RepeatableRequest

LOG = structlog.get_logger("loraplex.management")
CURSOR_DOMAIN: Final = b"loraplex/cursor/v1"
_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")

FoundT = TypeVar("FoundT")
ManagementCaller: TypeAlias = Caller | OperatorCaller
Read: TypeAlias = Callable[[AsyncSession], Awaitable[ApiResponse]]
Change: TypeAlias = Callable[[AsyncSession, AuditRepository], Awaitable[ApiResponse]]
Rows: TypeAlias = Callable[[AsyncSession, Page[RowT, KeyT]], Awaitable[Sequence[RowT]]]


class ManagementEndpoint:
    """Runs the work of routes in the caller's database role: a tenant sees its own rows, an operator sees all."""

    def __init__(self, dependencies: GatewayDependencies) -> None:
        self._dependencies = dependencies
        self._encrypted_responses = EncryptedResponses(dependencies.derive_key)
        self._cursor_key = dependencies.derive_key(CURSOR_DOMAIN)
        self._limiter = TenantLimiter("requests", per_tenant=AT_ONCE, waiting=MAX_WAITING)

    @property
    def served_model_name(self) -> str:
        """The name of the base model in requests."""
        return self._dependencies.served_model_name

    async def read(self, caller: ManagementCaller, work: Read) -> Response:
        """Respond with the result of `work`, which changes nothing."""
        async with self._transaction(caller) as session:
            return respond(await work(session))

    async def read_with_other_store(
        self,
        caller: ManagementCaller,
        find: Callable[[AsyncSession], Awaitable[FoundT]],
        build: Callable[[FoundT], Awaitable[ApiResponse]],
    ) -> Response:
        """Like `read`, for data of a second store: `build` runs in the same slot, but holds no database connection."""
        async with self._slot(caller):
            async with self._session(caller) as session:
                found = await find(session)
            return respond(await build(found))

    async def change(self, request: Request, caller: ManagementCaller, work: Change) -> Response:
        """Run and commit `work`, notify the gateways, and respond. A repeated POST with the Idempotency-Key of a completed
        one gets the stored response.

        An error of `work` rolls everything back and is not stored: the same key may be used again.
        """
        repeatable = _repeatable(request, caller)
        async with self._transaction(caller) as session:
            actor = _actor(request, caller)
            audit = AuditRepository(session, actor, tenant_of(caller))
            if repeatable is None:
                response = respond(await work(session, audit))
            else:
                response = await self._once(session, repeatable, lambda: work(session, audit))
        for tenant_id in audit.tenants:
            await self._publish(tenant_id)
        return response

    async def listing(
        self,
        request: Request,
        caller: ManagementCaller,
        order: SortOrder[RowT, KeyT],
        rows: Rows[RowT, KeyT],
        to_response: Callable[[RowT], ResponseModel],
        filters: Iterable[str] = (),
    ) -> Response:
        """Respond with the requested page. `rows` reads up to `fetch` rows that follow `after` in `order`."""
        page = self.page(request, caller, order, filters)

        async def work(session: AsyncSession) -> ApiResponse:
            return ApiResponse(200, page.listing(await rows(session, page), to_response))

        return await self.read(caller, work)

    def page(
        self,
        request: Request,
        caller: ManagementCaller,
        order: SortOrder[RowT, KeyT],
        filters: Iterable[str] = (),
    ) -> Page[RowT, KeyT]:
        """Parse the query of a listing. Its cursors are valid for this path and this caller only."""
        scope = f"{tenant_of(caller) or 'operator'} {request.url.path}".encode()
        return page_of(request, Cursors(self._cursor_key, scope), order, filters)

    async def _once(
        self, session: AsyncSession, request: RepeatableRequest, work: Callable[[], Awaitable[ApiResponse]]
    ) -> Response:
        lifetime = timedelta(seconds=self._dependencies.config.idempotency_s)
        records = IdempotencyRepository(session, lifetime)
        stored = await records.begin(request)
        if stored is not None:
            return self._encrypted_responses.decrypt(request, stored)
        response = respond(await work())
        await records.finish(
            request, response.status_code, self._encrypted_responses.encrypt(request, response)
        )
        return response

    async def _publish(self, tenant_id: UUID) -> None:
        """Notify the gateways. A failure is logged only: the change is committed, and a gateway that misses the notification
        learns of it when its cached key expires.
        """
        publisher = self._dependencies.policy_publisher
        if publisher is None:
            return
        try:
            await publisher.publish(tenant_id)
        except StoreUnavailable as error:
            LOG.warning("policy change not published", tenant_id=str(tenant_id), reason=str(error))

    def transaction_slot(self, tenant_id: UUID) -> AbstractAsyncContextManager[None]:
        """Take one of the tenant's slots, for transactions of its requests that do not run here. Raises `Overloaded`."""
        return self._limiter.slot(tenant_id)

    @asynccontextmanager
    async def _transaction(self, caller: ManagementCaller) -> AsyncIterator[AsyncSession]:
        async with self._slot(caller), self._session(caller) as session:
            yield session

    def _slot(self, caller: ManagementCaller) -> AbstractAsyncContextManager[None]:
        tenant_id = tenant_of(caller)
        return nullcontext() if tenant_id is None else self.transaction_slot(tenant_id)

    def _session(self, caller: ManagementCaller) -> AbstractAsyncContextManager[AsyncSession]:
        tenant_id, database = tenant_of(caller), self._dependencies.database
        return database.as_operator() if tenant_id is None else database.as_tenant(tenant_id)


def tenant_of(caller: ManagementCaller) -> UUID | None:
    """Return the caller's tenant; None for an operator."""
    return caller.tenant_id if isinstance(caller, Caller) else None


def _actor(request: Request, caller: ManagementCaller) -> Actor:
    kind: Literal["key", "operator"] = "key" if isinstance(caller, Caller) else "operator"
    return Actor(kind, caller.key_id, caller.address, request_id_of(request.scope))


def _repeatable(request: Request, caller: ManagementCaller) -> RepeatableRequest | None:
    given = request.headers.getlist("idempotency-key")
    if request.method != "POST" or not given:
        return None
    if len(given) != 1 or not _IDEMPOTENCY_KEY.fullmatch(given[0]):
        raise InvalidParameter(
            "Idempotency-Key must be one text of 1 to 255 visible ASCII characters.", param="Idempotency-Key"
        )
    return RepeatableRequest(
        caller=f"key:{caller.api_key_id}",
        key=given[0],
        route=f"{request.method} {request.url.path}",
        body_sha256=body_sha256(request),
        tenant_id=tenant_of(caller),
    )
