"""`/operator/v1/tenants/{id}/credits`: grant credits, and list them with what is left of each; `/operator/v1/invoices`: preview,
finalize, list, read, record the payment of, and void invoices.
"""

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.web.invoices.formats import FORMAT, RESPONSES, format_of, formatted
from loraplex.platform.web.invoices.routes import BY_GRANT, FILTERS, InvoiceId, checked_filters
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import TenantId, filtered_tenant
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.request_bodies import RequestModel, Time, request_model
from loraplex.platform.web.responses import documented
from loraplex.platform.web.sorting import BY_CREATION
from loraplex.tenants.invoices import queries, use_cases
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import (
    DEFAULT_PRIORITY,
    MAX_CREDIT_MICRO,
    MAX_PRIORITY,
    MAX_REASON,
    MAX_REFERENCE,
    CreditDocument,
    InvoiceDocument,
    InvoiceSummaryDocument,
)

Operator = Annotated[OperatorRequest, requires_operator()]
OPERATOR_FILTERS: Final = {"tenant_id": "Only invoices of this tenant.", **FILTERS}
CHANGED: Final = documented(409, 422, response=InvoiceDocument)

router = APIRouter()


class NewCreditBody(RequestModel):
    """`currency` absent or null: that of the tenant now. It pays for months that end before `expires_at`."""

    amount_micro: Annotated[int, Field(ge=1, le=MAX_CREDIT_MICRO)]
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = DEFAULT_PRIORITY
    expires_at: Time | None = None
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None


class InvoiceOfMonth(RequestModel):
    """`currency` absent or null: that of the tenant in the month."""

    tenant_id: UUID
    month: str
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None


class Payment(RequestModel):
    """`reference`: what the payment is found by, such as the id of a bank transfer."""

    reference: Annotated[str, Field(min_length=1, max_length=MAX_REFERENCE)]


class Nothing(RequestModel):
    """A body without fields."""


@router.get("/tenants/{tenant_id}/credits", **listed(CreditDocument))
async def list_tenant_credits(request: Operator, tenant_id: TenantId) -> Response:
    page = request.page(BY_GRANT)
    return await request.listing(page, queries.credits_of_tenant, tenant_id, page)


@router.post(
    "/tenants/{tenant_id}/credits",
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


@router.get("/invoices", **listed(InvoiceSummaryDocument, OPERATOR_FILTERS))
async def list_invoices(request: Operator) -> Response:
    page = request.page(BY_CREATION, OPERATOR_FILTERS)
    filters = checked_filters(page.filters)
    if "tenant_id" in filters:
        filters["tenant_id"] = filtered_tenant(filters["tenant_id"])
    return await request.listing(page, queries.invoices, None, filters, page)


@router.get("/invoices/{invoice_id}", responses=RESPONSES, openapi_extra={"parameters": [FORMAT]})
async def get_invoice(request: Operator, invoice_id: InvoiceId) -> Response:
    name = format_of(request.http)
    return formatted(await request.query(queries.invoice, None, invoice_id), name)


@router.post(
    "/invoices/preview",
    responses=documented(response=InvoiceDocument),
    openapi_extra=described(InvoiceOfMonth),
)
async def preview_invoice(
    request: Operator, body: Annotated[InvoiceOfMonth, request_model(InvoiceOfMonth)]
) -> Response:
    """What finalizing the month would lead to. It writes nothing."""
    return await request.read(queries.preview, body.tenant_id, Month.parse(body.month), body.currency)


@router.post(
    "/invoices/finalize", responses=CHANGED, openapi_extra=described(InvoiceOfMonth, repeatable=True)
)
async def finalize_invoice(
    request: Operator, body: Annotated[InvoiceOfMonth, request_model(InvoiceOfMonth)]
) -> Response:
    """Make the invoice of a month final that is over, also within its grace. One that is final stays as it is."""
    month = Month.parse(body.month)
    return await request.run(use_cases.finalize, body.tenant_id, month, currency=body.currency)


@router.post(
    "/invoices/{invoice_id}/paid", responses=CHANGED, openapi_extra=described(Payment, repeatable=True)
)
async def record_payment(
    request: Operator, invoice_id: InvoiceId, body: Annotated[Payment, request_model(Payment)]
) -> Response:
    return await request.run(use_cases.pay, invoice_id, body.reference)


@router.post(
    "/invoices/{invoice_id}/void",
    responses=CHANGED,
    openapi_extra=described(Nothing, optional_body=True, repeatable=True),
)
async def void_invoice(
    request: Operator,
    invoice_id: InvoiceId,
    body: Annotated[Nothing, request_model(Nothing, optional=True)],
) -> Response:
    """Cancel a final invoice. Its credits are given back; what it billed is billed again by the next one."""
    return await request.run(use_cases.void, invoice_id)
