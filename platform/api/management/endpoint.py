"""One request of the tenant or operator plane: one transaction, its audit rows, and its answer, kept if it may be repeated.

Invariant: the change, its audit rows and its kept answer are committed together or not at all; gateways hear of it after.
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
from loraplex.platform.tenant_limiter import WaitingTenantLimiter
from loraplex.tenants.audit_log import Actor, AuditRepository
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.idempotency import IdempotencyRepository, RepeatableRequest

LOG = structlog.get_logger("loraplex.plane")
CURSOR_DOMAIN: Final = b"loraplex/cursor/v1"
_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")

FoundT = TypeVar("FoundT")
PlaneCaller: TypeAlias = Caller | OperatorCaller
Read: TypeAlias = Callable[[AsyncSession], Awaitable[ApiResponse]]
Change: TypeAlias = Callable[[AsyncSession, AuditRepository], Awaitable[ApiResponse]]
Rows: TypeAlias = Callable[[AsyncSession, Page[RowT, KeyT]], Awaitable[Sequence[RowT]]]


class ManagementEndpoint:
    """Runs the work of routes as what their caller is: a tenant sees its own rows, an operator all."""

    def __init__(self, services: GatewayDependencies) -> None:
        self._services = services
        self._sealed = EncryptedResponses(services.derive_key)
        self._cursor_key = services.derive_key(CURSOR_DOMAIN)
        self._turns = WaitingTenantLimiter()

    @property
    def served_model_name(self) -> str:
        """What the base model is called in requests."""
        return self._services.served_model_name

    async def read(self, caller: PlaneCaller, work: Read) -> Response:
        """The answer of `work`, which changes nothing."""
        async with self._transaction(caller) as session:
            return respond(await work(session))

    async def read_beside(
        self,
        caller: PlaneCaller,
        find: Callable[[AsyncSession], Awaitable[FoundT]],
        tell: Callable[[FoundT], Awaitable[ApiResponse]],
    ) -> Response:
        """As `read`, for what lies in another store too: `tell` is asked in the same turn, and holds no connection."""
        async with self._turn(caller):
            async with self._session(caller) as session:
                found = await find(session)
            return respond(await tell(found))

    async def change(self, request: Request, caller: PlaneCaller, work: Change) -> Response:
        """The answer of `work` after its commit; a POST with an Idempotency-Key that was answered is answered the same.

        An error of `work` undoes all of it and is not kept: the same key may try again.
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
        caller: PlaneCaller,
        order: SortOrder[RowT, KeyT],
        rows: Rows[RowT, KeyT],
        shown: Callable[[RowT], ResponseModel],
        filters: Iterable[str] = (),
    ) -> Response:
        """The page that the query asks for. `rows` reads `fetch` rows behind `after`, in that order."""
        page = self.page(request, caller, order, filters)

        async def work(session: AsyncSession) -> ApiResponse:
            return ApiResponse(200, page.listing(await rows(session, page), shown))

        return await self.read(caller, work)

    def page(
        self, request: Request, caller: PlaneCaller, order: SortOrder[RowT, KeyT], filters: Iterable[str] = ()
    ) -> Page[RowT, KeyT]:
        """What the query asks for, of the listing at this path as `caller` sees it."""
        scope = f"{tenant_of(caller) or 'operator'} {request.url.path}".encode()
        return page_of(request, Cursors(self._cursor_key, scope), order, filters)

    async def _once(
        self, session: AsyncSession, request: RepeatableRequest, work: Callable[[], Awaitable[ApiResponse]]
    ) -> Response:
        kept = timedelta(seconds=self._services.limits.idempotency_s)
        records = IdempotencyRepository(session, kept)
        sealed = await records.begin(request)
        if sealed is not None:
            return self._sealed.open(request, sealed)
        response = respond(await work())
        await records.finish(request, response.status_code, self._sealed.seal(request, response))
        return response

    async def _publish(self, tenant_id: UUID) -> None:
        """What was committed stays so: a gateway that does not hear of it learns it when its cached key grows old."""
        policies = self._services.policies
        if policies is None:
            return
        try:
            await policies.publish(tenant_id)
        except StoreUnavailable as error:
            LOG.warning("policy change not published", tenant_id=str(tenant_id), reason=str(error))

    def turn(self, tenant_id: UUID) -> AbstractAsyncContextManager[None]:
        """For transactions of the tenant's requests that do not run here. Raises `Overloaded`."""
        return self._turns.taken(tenant_id)

    @asynccontextmanager
    async def _transaction(self, caller: PlaneCaller) -> AsyncIterator[AsyncSession]:
        async with self._turn(caller), self._session(caller) as session:
            yield session

    def _turn(self, caller: PlaneCaller) -> AbstractAsyncContextManager[None]:
        tenant_id = tenant_of(caller)
        return nullcontext() if tenant_id is None else self.turn(tenant_id)

    def _session(self, caller: PlaneCaller) -> AbstractAsyncContextManager[AsyncSession]:
        tenant_id, database = tenant_of(caller), self._services.database
        return database.as_operator() if tenant_id is None else database.as_tenant(tenant_id)


def tenant_of(caller: PlaneCaller) -> UUID | None:
    """None for an operator."""
    return caller.tenant_id if isinstance(caller, Caller) else None


def _actor(request: Request, caller: PlaneCaller) -> Actor:
    kind: Literal["key", "operator"] = "key" if isinstance(caller, Caller) else "operator"
    return Actor(kind, caller.key_id, caller.address, request_id_of(request.scope))


def _repeatable(request: Request, caller: PlaneCaller) -> RepeatableRequest | None:
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
