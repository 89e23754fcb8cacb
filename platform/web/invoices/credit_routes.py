"""`/operator/v1/tenants/{id}/credits`: grant credits to a tenant, and list them with what is left of each."""

from collections.abc import Sequence
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.services.billing import credits
from loraplex.platform.web.cursors import Page
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.invoices.documents import BY_GRANT, CreditDocument, to_credit
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import tenant_id_of
from loraplex.platform.web.request_bodies import RequestModel, Time, request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.invoices.credits import (
    DEFAULT_PRIORITY,
    MAX_PRIORITY,
    MAX_REASON,
    CreditRepository,
    GrantedCredit,
)
from loraplex.tenants.models.invoices import MAX_CREDIT_MICRO
from loraplex.tenants.unit_of_work import UnitOfWork


class NewCreditBody(RequestModel):
    """`currency` absent or null: that of the tenant now. It pays for months that end before `expires_at`."""

    amount_micro: Annotated[int, Field(ge=1, le=MAX_CREDIT_MICRO)]
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = DEFAULT_PRIORITY
    expires_at: Time | None = None
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None


def credits_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/tenants/{tenant_id}/credits")
    operator = Depends(authenticator.requires_operator())

    @router.get("", **listed(CreditDocument))
    async def list_tenant_credits(
        tenant_id: str, request: Request, caller: Annotated[OperatorCaller, operator]
    ) -> Response:
        async def rows(session: AsyncSession, page: Page[GrantedCredit, UUID]) -> Sequence[GrantedCredit]:
            tenant = await TenantRepository(session).by_id(tenant_id_of(tenant_id))
            return await CreditRepository(session, tenant.id).page(page.after, page.fetch)

        return await endpoint.listing(request, caller, BY_GRANT, rows, to_credit)

    @router.post(
        "",
        status_code=201,
        responses=documented(409, 422, response=CreditDocument, status=201),
        openapi_extra=described(NewCreditBody, repeatable=True),
    )
    async def grant_credit(
        tenant_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[NewCreditBody, request_model(NewCreditBody)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            granted = await credits.grant(
                *(uow, tenant_id_of(tenant_id), body.amount_micro, body.reason),
                priority=body.priority,
                expires_at=body.expires_at,
                currency=body.currency,
            )
            return ApiResponse(201, to_credit(granted))

        return await endpoint.perform(request, caller, work)

    return router
