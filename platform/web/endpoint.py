"""Runs one request of the tenant or operator plane: a query, or a use case in one unit of work, and its response.

Invariant: a route runs in the caller's database role and in one of its tenant's slots.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.web.cursors import CURSOR_DOMAIN, Cursors, Page, page_of
from loraplex.platform.web.request_bodies import body_sha256
from loraplex.platform.web.responses import (
    ApiResponse,
    ResponseModel,
    from_stored,
    respond,
    to_stored,
)
from loraplex.platform.web.runner import Runner
from loraplex.platform.web.sorting import KeyT, RowT, SortOrder
from loraplex.tenants.actors import Actor, key_actor, operator_actor
from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.stored_responses import StoredResponse
from loraplex.tenants.unit_of_work import UnitOfWork

_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")

FoundT = TypeVar("FoundT")
ManagementCaller: TypeAlias = Caller | OperatorCaller
Read: TypeAlias = Callable[[AsyncSession], Awaitable[ApiResponse]]
UseCase: TypeAlias = Callable[[UnitOfWork], Awaitable[ApiResponse]]
Rows: TypeAlias = Callable[[AsyncSession, Page[RowT, KeyT]], Awaitable[Sequence[RowT]]]


class ManagementEndpoint:
    """Runs the work of routes in the caller's database role: a tenant sees its own rows, an operator sees all."""

    def __init__(self, dependencies: GatewayDependencies) -> None:
        self._dependencies = dependencies
        self._cursor_key = dependencies.derive_key(CURSOR_DOMAIN)
        self.runner = Runner(dependencies, "requests")

    @property
    def served_model_name(self) -> str:
        """The name of the base model in requests."""
        return self._dependencies.served_model_name

    async def read(self, caller: ManagementCaller, work: Read) -> Response:
        """Respond with the result of `work`, which changes nothing."""
        return respond(await self.runner.query(tenant_of(caller), work))

    async def query(
        self, caller: ManagementCaller, find: Callable[[AsyncSession], Awaitable[FoundT]]
    ) -> FoundT:
        """Return what `find` reads, for a response that takes several transactions or no `ApiResponse`."""
        return await self.runner.query(tenant_of(caller), find)

    async def perform(self, request: Request, caller: ManagementCaller, work: UseCase) -> Response:
        """Respond with the result of `work`, a use case that runs in one unit of work of the caller. A repeated POST with the
        Idempotency-Key of a completed one gets the stored response.
        """

        async def stored(uow: UnitOfWork) -> StoredResponse:
            return to_stored(respond(await work(uow)))

        tenant_id, actor = tenant_of(caller), actor_of(request, caller)
        return from_stored(await self.runner.change(actor, tenant_id, repeatable_of(request, caller), stored))

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

    def transaction_slot(self, tenant_id: UUID) -> AbstractAsyncContextManager[None]:
        """Take one of the tenant's slots, for transactions of its requests that do not run here. Raises `Overloaded`."""
        return self.runner.slot(tenant_id)


def tenant_of(caller: ManagementCaller) -> UUID | None:
    """Return the caller's tenant; None for an operator."""
    return caller.tenant_id if isinstance(caller, Caller) else None


def actor_of(request: Request, caller: ManagementCaller) -> Actor:
    """Return the caller as the author of a change."""
    actor = key_actor if isinstance(caller, Caller) else operator_actor
    return actor(caller.key_id, caller.address, request_id_of(request.scope))


def repeatable_of(request: Request, caller: ManagementCaller) -> RepeatableRequest | None:
    """Return the identity of a POST with an Idempotency-Key; None without one. Raises `InvalidParameter`."""
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
