"""`/operator/v1/tenants`: create, list, suspend, resume and delete tenants, and set their tier and share of the engine.

Invariant: a change applies to the tenant's next request on every gateway. A deletion stops the tenant at once; its data is
erased in the background.
"""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.api.management.endpoint import ManagementEndpoint
from loraplex.platform.api.management.etags import if_match, require_revision
from loraplex.platform.api.management.openapi import described, listed
from loraplex.platform.api.management.request_bodies import RequestModel, request_model
from loraplex.platform.api.management.responses import ApiResponse, documented
from loraplex.platform.api.management.sorting import SortOrder, by_text
from loraplex.platform.api.schemas.tenants import (
    NewTenantDocument,
    TenantAccountDocument,
    fields,
    tenant_id_of,
)
from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.accounts.tenants import MAX_WEIGHT, TenantRepository, TierChange
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.scopes import TENANT_ADMIN
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.models import Tenant
from loraplex.tenants.names import TENANT_NAME

FIRST_KEY_NAME: Final = "admin"
BY_NAME: Final[SortOrder[Tenant, str]] = by_text(lambda tenant: tenant.name)
Name = Annotated[str, Field(pattern=TENANT_NAME)]
Weight = Annotated[float, Field(gt=0, le=MAX_WEIGHT)]


class NewTenant(RequestModel):
    name: Name
    tier: Name = "standard"
    weight: Weight = 1.0


class Tier(RequestModel):
    """Fields that are absent stay unchanged."""

    tier: Name | None = None
    weight: Weight | None = None


class Nothing(RequestModel):
    """A body without fields."""


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
        async def work(session: AsyncSession, audit: AuditRepository) -> ApiResponse:
            tenant = await TenantRepository(session).create(body.name, body.weight, body.tier)
            key = await KeyRepository(session).create(tenant.id, FIRST_KEY_NAME, [TENANT_ADMIN])
            after = {**fields(tenant), "key_id": key.record.key_id}
            await audit.record("tenant.create", target(tenant), None, after, tenant_id=tenant.id)
            document = NewTenantDocument(**fields(tenant), api_key=key.plaintext)
            return ApiResponse(201, document, tenant.revision, headers={"cache-control": "no-store"})

        return await endpoint.change(request, caller, work)

    for verb in ("suspend", "resume"):
        _add_suspension(router, endpoint, operator, verb)

    @router.delete(
        "/{tenant_id}", status_code=202, responses=documented(response=TenantAccountDocument, status=202)
    )
    async def delete_tenant(
        tenant_id: str, request: Request, caller: Annotated[OperatorCaller, operator]
    ) -> Response:
        async def work(session: AsyncSession, audit: AuditRepository) -> ApiResponse:
            before = fields(await TenantRepository(session).by_id(tenant_id_of(tenant_id)))
            tenant = await TenantDeletions(session).begin(tenant_id_of(tenant_id))
            if before["deleted_at"] is None:
                await audit.record(
                    "tenant.delete", target(tenant), before, fields(tenant), tenant_id=tenant.id
                )
            return api_response(tenant, 202)

        return await endpoint.change(request, caller, work)


def _add_suspension(router: APIRouter, endpoint: ManagementEndpoint, operator: object, verb: str) -> None:
    @router.post(
        f"/{{tenant_id}}/{verb}",
        responses=documented(409, 422, response=TenantAccountDocument),
        openapi_extra=described(Nothing, optional_body=True, repeatable=True),
        name=f"{verb}_tenant",
    )
    async def switch(
        tenant_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[Nothing, request_model(Nothing, optional=True)],
    ) -> Response:
        async def work(session: AsyncSession, audit: AuditRepository) -> ApiResponse:
            tenants = TenantRepository(session)
            tenant = await tenants.living(tenant_id_of(tenant_id))
            before = fields(tenant)
            await (tenants.suspend if verb == "suspend" else tenants.resume)(tenant.name)
            if before != fields(tenant):
                await audit.record(
                    f"tenant.{verb}", target(tenant), before, fields(tenant), tenant_id=tenant.id
                )
            return api_response(tenant)

        return await endpoint.change(request, caller, work)


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

        async def work(session: AsyncSession, audit: AuditRepository) -> ApiResponse:
            tenants = TenantRepository(session)
            tenant = await tenants.living(tenant_id_of(tenant_id))
            require_revision(seen, tenant.revision)
            before = fields(tenant)
            await tenants.change_tier(tenant, TierChange(body.tier, body.weight))
            if before != fields(tenant):
                await audit.record(
                    "tenant.change_tier", target(tenant), before, fields(tenant), tenant_id=tenant.id
                )
            return api_response(tenant)

        return await endpoint.change(request, caller, work)


def target(tenant: Tenant) -> str:
    """Return the tenant's name in the audit log."""
    return f"tenants/{tenant.id}"


def to_response(tenant: Tenant) -> TenantAccountDocument:
    return TenantAccountDocument(**fields(tenant))


def api_response(tenant: Tenant, status: int = 200) -> ApiResponse:
    return ApiResponse(status, to_response(tenant), tenant.revision)
