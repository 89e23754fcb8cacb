"""`/operator/v1/tenants`: create, list, suspend, resume and delete tenants, and set their tier and share of the engine.

Invariant: a change applies to the tenant's next request on every gateway. A deletion stops the tenant at once; its data is
erased in the background.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Final, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.services import tenants
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import tenant_id_of
from loraplex.platform.web.request_bodies import BodyT, RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.platform.web.tenants.documents import (
    NewTenantDocument,
    TenantAccountDocument,
    new_tenant_response,
    to_response,
)
from loraplex.tenants.accounts.tenants import MAX_WEIGHT, TenantRepository, TierChange
from loraplex.tenants.models import Tenant
from loraplex.tenants.names import TENANT_NAME
from loraplex.tenants.unit_of_work import UnitOfWork

BY_NAME: Final[SortOrder[Tenant, str]] = by_text(lambda tenant: tenant.name)
Name = Annotated[str, Field(pattern=TENANT_NAME)]
Weight = Annotated[float, Field(gt=0, le=MAX_WEIGHT)]


class NewTenant(RequestModel):
    name: Name
    tier: Name = "standard"
    weight: Weight = 1.0


class Tier(RequestModel):
    """Fields that are absent stay unchanged. `unknown_parameters`: `default` is what the installation sets."""

    tier: Name | None = None
    weight: Weight | None = None
    unknown_parameters: Literal["default", "refuse", "report"] | None = None


class Nothing(RequestModel):
    """A body without fields."""


class Suspend(RequestModel):
    """`end_running`: the tenant's running requests end within 2 s, on every gateway, and are billed by what was delivered; else
    they run on to their end.
    """

    end_running: bool = True


def tenants_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/tenants")
    operator = Depends(authenticator.requires_operator())
    _add_reads(router, endpoint, operator)
    _add_lifecycle(router, endpoint, operator)
    _add_tier(router, endpoint, operator)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    @router.get("", **listed(TenantAccountDocument))
    async def list_tenants(request: Request, caller: Annotated[OperatorCaller, operator]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_NAME,
            lambda session, page: TenantRepository(session).page(page.after, page.fetch),
            to_response,
        )

    @router.get("/{tenant_id}", responses=documented(response=TenantAccountDocument))
    async def get_tenant(tenant_id: str, caller: Annotated[OperatorCaller, operator]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            return api_response(await TenantRepository(session).by_id(tenant_id_of(tenant_id)))

        return await endpoint.read(caller, work)


def _add_lifecycle(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    @router.post(
        "",
        status_code=201,
        responses=documented(409, 422, response=NewTenantDocument, status=201),
        openapi_extra=described(NewTenant, repeatable=True),
    )
    async def create_tenant(
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[NewTenant, request_model(NewTenant)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            created = await tenants.create(uow, body.name, tier=body.tier, weight=body.weight)
            headers = {"cache-control": "no-store"}
            return ApiResponse(201, new_tenant_response(created), created.tenant.revision, headers)

        return await endpoint.perform(request, caller, work)

    async def suspend(uow: UnitOfWork, tenant_id: UUID, body: Suspend) -> Tenant:
        return await tenants.suspend(uow, tenant_id, end_running=body.end_running)

    async def resume(uow: UnitOfWork, tenant_id: UUID, _: Nothing) -> Tenant:
        return await tenants.resume(uow, tenant_id)

    _add_suspension(router, endpoint, operator, "suspend", suspend, Suspend)
    _add_suspension(router, endpoint, operator, "resume", resume, Nothing)

    @router.delete(
        "/{tenant_id}", status_code=202, responses=documented(response=TenantAccountDocument, status=202)
    )
    async def delete_tenant(
        tenant_id: str, request: Request, caller: Annotated[OperatorCaller, operator]
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            return api_response(await tenants.delete(uow, tenant_id_of(tenant_id)), 202)

        return await endpoint.perform(request, caller, work)


def _add_suspension(
    router: APIRouter,
    endpoint: ManagementEndpoint,
    operator: object,
    verb: str,
    use_case: Callable[[UnitOfWork, UUID, BodyT], Awaitable[Tenant]],
    model: type[BodyT],
) -> None:
    @router.post(
        f"/{{tenant_id}}/{verb}",
        responses=documented(409, 422, response=TenantAccountDocument),
        openapi_extra=described(model, optional_body=True, repeatable=True),
        name=f"{verb}_tenant",
    )
    async def switch(
        tenant_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[BodyT, request_model(model, optional=True)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            return api_response(await use_case(uow, tenant_id_of(tenant_id), body))

        return await endpoint.perform(request, caller, work)


def _add_tier(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    @router.patch(
        "/{tenant_id}/tier",
        responses=documented(412, 428, response=TenantAccountDocument),
        openapi_extra=described(Tier, if_match=True),
    )
    async def change_tier(
        tenant_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[Tier, request_model(Tier)],
    ) -> Response:
        seen = if_match(request)
        for name in body.model_fields_set:
            if getattr(body, name) is None:
                raise InvalidParameter(f"`{name}` must not be null.", param=name)

        async def work(uow: UnitOfWork) -> ApiResponse:
            change = TierChange(body.tier, body.weight, body.unknown_parameters)
            return api_response(await tenants.change_tier(uow, tenant_id_of(tenant_id), change, seen=seen))

        return await endpoint.perform(request, caller, work)


def api_response(tenant: Tenant, status: int = 200) -> ApiResponse:
    return ApiResponse(status, to_response(tenant), tenant.revision)
