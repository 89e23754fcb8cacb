"""`/operator/v1/tenants/{id}/credits`: grant credits to a tenant, and list them with what is left of each."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.web.invoices.operator_routes import Operator
from loraplex.platform.web.invoices.routes import BY_GRANT
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import TenantId
from loraplex.platform.web.request_bodies import RequestModel, Time, request_model
from loraplex.platform.web.responses import documented
from loraplex.tenants.invoices import queries, use_cases
from loraplex.tenants.invoices.records import (
    DEFAULT_PRIORITY,
    MAX_CREDIT_MICRO,
    MAX_PRIORITY,
    MAX_REASON,
    CreditDocument,
)

router = APIRouter(prefix="/tenants/{tenant_id}/credits")


class NewCreditBody(RequestModel):
    """`currency` absent or null: that of the tenant now. It pays for months that end before `expires_at`."""

    amount_micro: Annotated[int, Field(ge=1, le=MAX_CREDIT_MICRO)]
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = DEFAULT_PRIORITY
    expires_at: Time | None = None
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None


@router.get("", **listed(CreditDocument))
async def list_tenant_credits(request: Operator, tenant_id: TenantId) -> Response:
    page = request.page(BY_GRANT)
    return await request.listing(page, queries.credits_of_tenant, tenant_id, page)


@router.post(
    "",
    status_code=201,
    responses=documented(409, 422, response=CreditDocument, status=201),
    openapi_extra=described(NewCreditBody, repeatable=True),
)
async def grant_credit(
    request: Operator, tenant_id: TenantId, body: Annotated[NewCreditBody, request_model(NewCreditBody)]
) -> Response:
    return await request.run(
        use_cases.grant_credit,
        tenant_id,
        body.amount_micro,
        body.reason,
        priority=body.priority,
        expires_at=body.expires_at,
        currency=body.currency,
    )
