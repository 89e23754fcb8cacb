"""`/tenant/v1/billing/invoices` and `/tenant/v1/billing/credits`: what a tenant is billed, and what it has left of its credits."""

from collections.abc import Mapping
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.invoices.formats import FORMAT, RESPONSES, format_of, formatted
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.path_ids import PathId
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.sorting import BY_CREATION, SortOrder, by_id
from loraplex.tenants.errors import InvoiceNotFound
from loraplex.tenants.invoices import queries
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import INVOICE_STATES, CreditDocument, InvoiceSummaryDocument
from loraplex.tenants.scopes import BILLING_READ

Reader = Annotated[TenantRequest, requires(BILLING_READ)]
INVOICE_ID: Final = PathId(InvoiceNotFound, "no invoice {}")
InvoiceId = Annotated[UUID, INVOICE_ID]
BY_GRANT: Final[SortOrder[CreditDocument, UUID]] = by_id(lambda credit: credit.id)
FILTERS: Final = {
    "month": "Only invoices of this month, `YYYY-MM`.",
    "state": "Only invoices in this state: `draft`, `final`, `paid` or `void`.",
}

router = APIRouter(prefix="/billing")


@router.get("/credits", **listed(CreditDocument))
async def list_credits(request: Reader) -> Response:
    page = request.page(BY_GRANT)
    return await request.listing(page, queries.credits, request.tenant_id, page)


@router.get("/invoices", **listed(InvoiceSummaryDocument, FILTERS))
async def list_own_invoices(request: Reader) -> Response:
    page = request.page(BY_CREATION, FILTERS)
    filters = checked_filters(page.filters)
    return await request.listing(page, queries.invoices, request.tenant_id, filters, page)


@router.get("/invoices/{invoice_id}", responses=RESPONSES, openapi_extra={"parameters": [FORMAT]})
async def get_own_invoice(request: Reader, invoice_id: InvoiceId) -> Response:
    """One invoice; a draft as it would be now."""
    name = format_of(request.http)
    return formatted(await request.query(queries.invoice, request.tenant_id, invoice_id), name)


def checked_filters(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the filters of a listing of invoices. Raises `InvalidParameter`, `InvalidField`."""
    if "month" in given:
        Month.parse(given["month"])
    if given.get("state", INVOICE_STATES[0]) not in INVOICE_STATES:
        raise InvalidParameter(f"`state` must be one of {', '.join(INVOICE_STATES)}.", param="state")
    return dict(given)
