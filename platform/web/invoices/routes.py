"""`/tenant/v1/billing/invoices` and `/tenant/v1/billing/credits`: what a tenant is billed, and what it has left of its credits."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.invoices.documents import (
    BY_GRANT,
    BY_TIME,
    FILTERS,
    FORMAT,
    RESPONSES,
    CreditDocument,
    InvoiceSummaryDocument,
    checked_filters,
    format_of,
    formatted,
    invoice_id_of,
    to_credit,
    to_summary,
)
from loraplex.platform.web.openapi import listed
from loraplex.tenants.invoices.credits import CreditRepository
from loraplex.tenants.invoices.invoices import InvoiceDetails, InvoiceRepository

READ: Final = "billing:read"


def invoices_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/billing")
    reader = Depends(authenticator.requires(READ))

    @router.get("/credits", **listed(CreditDocument))
    async def list_credits(request: Request, caller: Annotated[Caller, reader]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_GRANT,
            lambda session, page: CreditRepository(session, caller.tenant_id).page(page.after, page.fetch),
            to_credit,
        )

    @router.get("/invoices", **listed(InvoiceSummaryDocument, FILTERS))
    async def list_own_invoices(request: Request, caller: Annotated[Caller, reader]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_TIME,
            lambda session, page: InvoiceRepository(session, caller.tenant_id).page(
                checked_filters(page.filters), page.after, page.fetch
            ),
            to_summary,
            FILTERS,
        )

    @router.get(
        "/invoices/{invoice_id}",
        responses=RESPONSES,
        openapi_extra={"parameters": [FORMAT]},
    )
    async def get_own_invoice(
        invoice_id: str, request: Request, caller: Annotated[Caller, reader]
    ) -> Response:
        """One invoice; a draft as it would be now."""
        name = format_of(request)

        async def find(session: AsyncSession) -> InvoiceDetails:
            repository = InvoiceRepository(session, caller.tenant_id)
            return await repository.details(await repository.by_id(invoice_id_of(invoice_id)))

        return formatted(await endpoint.query(caller, find), name)

    return router
