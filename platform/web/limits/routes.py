"""Routes of limits: limits and their use, narrower limits of keys and adapters, explanations of refusals, threshold events."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.services import quotas
from loraplex.platform.services.quotas import ChangedLimits
from loraplex.platform.web.cursors import page_parameters
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.limits.documents import (
    EventDocument,
    ExplanationDocument,
    LimitsDocument,
    QuotaLimitFields,
    QuotasDocument,
    event_response,
    explanation_response,
    limits_response,
    quota_response,
)
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented, respond
from loraplex.platform.web.sorting import SortOrder, by_time
from loraplex.tenants.admission.controller import AdmissionController
from loraplex.tenants.counters.counter_replies import LimitUse
from loraplex.tenants.errors import RefusalNotFound
from loraplex.tenants.quotas.delegated_quotas import Place, QuotaRepository, QuotaState, ResourceUse
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.threshold_events import Event, quota_events
from loraplex.tenants.unit_of_work import UnitOfWork

READ: Final = "usage:read"
KEYS_WRITE: Final = "keys:write"
ADAPTERS_READ: Final = "adapters:read"
ADAPTERS_WRITE: Final = "adapters:write"
MAX_REQUEST_ID: Final = 200
BY_TIME: Final[SortOrder[Event, tuple[datetime, UUID]]] = by_time(
    lambda event: (event[0].created_at, event[0].id)
)
BY_PLACE: Final[SortOrder[QuotaState, Place]] = SortOrder(
    lambda state: state.place, lambda place: place, lambda position: (str(position[0]), str(position[1]))
)
Find = Callable[[QuotaRepository], Awaitable[QuotaState]]


class DelegatedQuotaUpdate(QuotaLimitFields):
    """All limits of a key or an adapter. Where one is null or absent, only that of the tenant applies; a key that has limits
    itself gives them to the key that it changes.
    """

    def limits(self) -> QuotaLimits:
        return QuotaLimits(**self.model_dump())


NARROWED: Final = documented(404, 412, 428, response=LimitsDocument)
NARROWING: Final = described(DelegatedQuotaUpdate, if_match=True)


def quotas_router(
    endpoint: ManagementEndpoint,
    authenticator: Authenticator,
    admission_controller: AdmissionController,
    currency_of: Callable[[UUID], str],
) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(READ))

    @router.get(
        "/quotas",
        responses=documented(response=QuotasDocument),
        openapi_extra={"parameters": page_parameters()},
    )
    async def list_quotas(request: Request, caller: Annotated[Caller, reader]) -> Response:
        page = endpoint.page(request, caller, BY_PLACE)

        async def find(session: AsyncSession) -> tuple[list[QuotaState], Mapping[str, ResourceUse] | None]:
            stored = QuotaRepository(session, caller.tenant_id)
            states = await stored.page(page.after, page.fetch)
            return states, await stored.resources(states[0].limits) if page.after is None else None

        async def build(found: tuple[list[QuotaState], Mapping[str, ResourceUse] | None]) -> ApiResponse:
            states, resources = found
            used: dict[UUID, list[LimitUse]] = {}
            subjects = [state.subject for state in states[: page.limit]]
            for use in await admission_controller.quotas(caller.tenant_id, subjects):
                used.setdefault(use.subject_id, []).append(use)
            listing = page.listing(
                states, lambda state: quota_response(state, used.get(state.subject_id, ()), resources)
            )
            document = QuotasDocument(
                currency=currency_of(caller.tenant_id), data=listing.data, next_cursor=listing.next_cursor
            )
            return ApiResponse(200, document)

        return await endpoint.read_with_other_store(caller, find, build)

    @router.get("/limits/explain/{request_id}", responses=documented(404, response=ExplanationDocument))
    async def explain(request_id: str, caller: Annotated[Caller, reader]) -> Response:
        found = await admission_controller.explain(caller.tenant_id, request_id[:MAX_REQUEST_ID])
        if found is None:
            raise RefusalNotFound("no request of this id was refused by a limit in the last 24 hours")
        return respond(ApiResponse(200, explanation_response(found)))

    @router.get("/events", **listed(EventDocument))
    async def list_events(request: Request, caller: Annotated[Caller, reader]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_TIME,
            lambda session, page: quota_events(session, caller.tenant_id, page.after, page.fetch),
            event_response,
        )

    _add_limits_of_keys(router, endpoint, authenticator)
    _add_limits_of_adapters(router, endpoint, authenticator)
    return router


def _add_limits_of_keys(
    router: APIRouter, endpoint: ManagementEndpoint, authenticator: Authenticator
) -> None:
    writer = Depends(authenticator.requires(KEYS_WRITE))

    @router.get("/keys/{key_id}/quotas", responses=documented(404, response=LimitsDocument))
    async def show_limits(key_id: str, caller: Annotated[Caller, writer]) -> Response:
        return await _limits(endpoint, caller, lambda stored: stored.key(key_id))

    @router.put("/keys/{key_id}/quotas", responses=NARROWED, openapi_extra=NARROWING)
    async def narrow_limits(
        key_id: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[DelegatedQuotaUpdate, request_model(DelegatedQuotaUpdate)],
    ) -> Response:
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            return narrowed(
                await quotas.narrow_key(
                    *(uow, caller.tenant_id, key_id, body.limits()), manager=caller.api_key_id, seen=seen
                )
            )

        return await endpoint.perform(request, caller, work)


def _add_limits_of_adapters(
    router: APIRouter, endpoint: ManagementEndpoint, authenticator: Authenticator
) -> None:
    reader = Depends(authenticator.requires(ADAPTERS_READ))
    writer = Depends(authenticator.requires(ADAPTERS_WRITE))

    @router.get("/adapters/{name}/quotas", responses=documented(404, response=LimitsDocument))
    async def show_limits(name: str, caller: Annotated[Caller, reader]) -> Response:
        return await _limits(endpoint, caller, lambda stored: stored.adapter(name))

    @router.put("/adapters/{name}/quotas", responses=NARROWED, openapi_extra=NARROWING)
    async def narrow_limits(
        name: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[DelegatedQuotaUpdate, request_model(DelegatedQuotaUpdate)],
    ) -> Response:
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            limits = body.limits()
            return narrowed(await quotas.narrow_adapter(uow, caller.tenant_id, name, limits, seen=seen))

        return await endpoint.perform(request, caller, work)


async def _limits(endpoint: ManagementEndpoint, caller: Caller, find: Find) -> Response:
    async def work(session: AsyncSession) -> ApiResponse:
        state = await find(QuotaRepository(session, caller.tenant_id))
        return ApiResponse(200, limits_response(state.limits), state.revision)

    return await endpoint.read(caller, work)


def narrowed(changed: ChangedLimits) -> ApiResponse:
    return ApiResponse(200, limits_response(changed.limits), changed.revision)
