"""What a route of the tenant or operator plane is given: the request of an authorized key, which reads, lists and changes.

A route asks for it by `requires(SCOPE)` or `requires_operator()`, first among its parameters, and returns what it returns:

    @router.get("/webhooks/{webhook_id}", responses=documented(response=WebhookDocument))
    async def get_webhook(request: Reader, webhook_id: WebhookId) -> Response:
        return await request.read(queries.webhook, request.tenant_id, webhook_id)

Invariant: a route runs in the caller's database role and in one of its tenant's slots.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, Self, TypeVar
from uuid import UUID

from fastapi import Depends
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.web.cursors import CURSOR_DOMAIN, Cursors, Page, page_of
from loraplex.platform.web.etags import if_match, if_match_or_any
from loraplex.platform.web.request_bodies import body_sha256
from loraplex.platform.web.responses import ApiResponse, from_stored, reply_with, respond, to_stored
from loraplex.platform.web.runner import Runner
from loraplex.platform.web.sorting import KeyT, RowT, SortOrder
from loraplex.tenants.actors import Actor
from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.stored_responses import StoredResponse
from loraplex.tenants.unit_of_work import UnitOfWork

P = ParamSpec("P")
T = TypeVar("T")
_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")
CallerT = TypeVar("CallerT", Caller, OperatorCaller)


class Planes:
    """What the routes of both planes share, as `app.state.planes`."""

    def __init__(self, dependencies: GatewayDependencies, authenticator: Authenticator) -> None:
        self.dependencies = dependencies
        self.authenticator = authenticator
        self.runner = Runner(dependencies, "requests")
        self.cursor_key = dependencies.derive_key(CURSOR_DOMAIN)


@dataclass(frozen=True, slots=True)
class PlaneRequest(Generic[CallerT]):
    """An authorized request. What a use case or query returns is sent with the status of the route, as `reply_with` says,
    or as the function says that `replying` was given.
    """

    planes: Planes
    http: Request
    caller: CallerT
    reply: Callable[[Any], ApiResponse] | None = None

    @property
    def dependencies(self) -> GatewayDependencies:
        """What the gateway's routes use."""
        return self.planes.dependencies

    @property
    def if_match(self) -> int:
        """The revision that the author of a change has read. Raises `PreconditionRequired`, `InvalidParameter`."""
        return if_match(self.http)

    @property
    def if_match_or_any(self) -> int | None:
        """The same where the header may be absent: None for any revision. Raises `InvalidParameter`."""
        return if_match_or_any(self.http)

    @property
    def actor(self) -> Actor:
        """The author of a change."""
        return actor_of(self.http, self.caller)

    def replying(self, reply: Callable[[Any], ApiResponse]) -> Self:
        """Return the same request, whose results are sent as `reply` says: with another status, ETag or header."""
        return replace(self, reply=reply)

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Take one of the caller's slots, for work that is no query and no change."""
        return self.planes.runner.slot(tenant_of(self.caller))

    def session(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a transaction for queries, in a slot that was taken."""
        return self.planes.runner.session(tenant_of(self.caller))

    def reading(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a transaction for several queries."""
        return self.planes.runner.reading(tenant_of(self.caller))

    async def query(
        self, find: Callable[Concatenate[AsyncSession, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `find` reads."""
        return await self.planes.runner.query(tenant_of(self.caller), find, *args, **kwargs)

    async def read(
        self,
        find: Callable[Concatenate[AsyncSession, P], Awaitable[object]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Response:
        """Respond with what `find` reads."""
        return self._respond(await self.query(find, *args, **kwargs))

    def page(self, order: SortOrder[RowT, KeyT], filters: Iterable[str] = ()) -> Page[RowT, KeyT]:
        """Parse the query of a listing. Its cursors are valid for this path and this caller only."""
        scope = f"{tenant_of(self.caller) or 'operator'} {self.http.url.path}".encode()
        return page_of(self.http, Cursors(self.planes.cursor_key, scope), order, filters)

    async def listing(
        self,
        page: Page[Any, KeyT],
        find: Callable[Concatenate[AsyncSession, P], Awaitable[Sequence[BaseModel]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Response:
        """Respond with a page of the records that `find` reads: one of its arguments is `page`."""
        found: Sequence[BaseModel] = await self.query(find, *args, **kwargs)
        return self._respond(page.listing(found))

    async def run(
        self,
        use_case: Callable[Concatenate[UnitOfWork, P], Awaitable[object]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Response:
        """Respond with what `use_case` returns, after its commit. A repeated POST with the Idempotency-Key of a
        completed one gets the stored response.
        """

        async def work(uow: UnitOfWork) -> StoredResponse:
            return to_stored(self._respond(await use_case(uow, *args, **kwargs)))

        runner, repeatable = self.planes.runner, repeatable_of(self.http, self.caller)
        return from_stored(await runner.change(self.actor, tenant_of(self.caller), repeatable, work))

    def _respond(self, result: Any) -> Response:
        if self.reply is not None:
            return respond(self.reply(result))
        return respond(reply_with(result, self.http.scope["route"].status_code or 200))


class TenantRequest(PlaneRequest[Caller]):
    """The request of a tenant's key."""

    @property
    def tenant_id(self) -> UUID:
        """The caller's tenant."""
        return self.caller.tenant_id


class OperatorRequest(PlaneRequest[OperatorCaller]):
    """The request of an operator's key."""


def requires(scope: str | None) -> Any:
    """Return a dependency that gives a route the `TenantRequest` of a key with `scope`; with None of any key of a tenant."""

    async def authorized(request: Request) -> TenantRequest:
        planes: Planes = request.app.state.planes
        return TenantRequest(planes, request, await planes.authenticator.authorize(request, scope))

    return Depends(authorized)


def requires_operator() -> Any:
    """Return a dependency that gives a route the `OperatorRequest` of an operator's key."""

    async def authorized(request: Request) -> OperatorRequest:
        planes: Planes = request.app.state.planes
        return OperatorRequest(planes, request, await planes.authenticator.authorize_operator(request))

    return Depends(authorized)


def tenant_of(caller: Caller | OperatorCaller) -> UUID | None:
    """Return the caller's tenant; None for an operator."""
    return caller.tenant_id if isinstance(caller, Caller) else None


def actor_of(request: Request, caller: Caller | OperatorCaller) -> Actor:
    """Return the caller as the author of a change."""
    kind: Literal["key", "operator"] = "key" if isinstance(caller, Caller) else "operator"
    return Actor(kind, caller.key_id, caller.address, request_id_of(request.scope))


def repeatable_of(request: Request, caller: Caller | OperatorCaller) -> RepeatableRequest | None:
    """Return the identity of a POST with an Idempotency-Key; None without one. Raises `InvalidParameter`."""
    key = idempotency_key(request) if request.method == "POST" else None
    if key is None:
        return None
    return RepeatableRequest(
        caller=f"key:{caller.api_key_id}",
        key=key,
        route=f"{request.method} {request.url.path}",
        body_sha256=body_sha256(request),
        tenant_id=tenant_of(caller),
    )


def idempotency_key(request: Request) -> str | None:
    """Return the Idempotency-Key; None without one. Raises `InvalidParameter`."""
    given = request.headers.getlist("idempotency-key")
    if given and (len(given) != 1 or not _IDEMPOTENCY_KEY.fullmatch(given[0])):
        raise InvalidParameter(
            "Idempotency-Key must be one text of 1 to 255 visible ASCII characters.", param="Idempotency-Key"
        )
    return given[0] if given else None
