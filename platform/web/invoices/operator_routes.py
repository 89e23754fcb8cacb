"""`/operator/v1/invoices`: preview, finalize, list, read, record the payment of, and void invoices."""

from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.services.billing import invoices
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.invoices.documents import (
    BY_TIME,
    FILTERS,
    FORMAT,
    RESPONSES,
    InvoiceDocument,
    InvoiceSummaryDocument,
    checked_filters,
    format_of,
    formatted,
    invoice_id_of,
    to_response,
    to_summary,
)
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import tenant_id_of
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.invoices.invoices import InvoiceDetails, InvoiceRepository
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import Invoice
from loraplex.tenants.unit_of_work import UnitOfWork

OPERATOR_FILTERS: Final = {"tenant_id": "Only invoices of this tenant.", **FILTERS}


class InvoiceOfMonth(RequestModel):
    """`currency` absent or null: that of the tenant in the month."""

    tenant_id: UUID
    month: str
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None


class Payment(RequestModel):
    """`reference`: what the payment is found by, such as the id of a bank transfer."""

    reference: Annotated[str, Field(min_length=1, max_length=invoices.MAX_REFERENCE)]


class Nothing(RequestModel):
    """A body without fields."""


def invoices_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/invoices")
    operator = Depends(authenticator.requires_operator())
    _add_reads(router, endpoint, operator)
    _add_closing(router, endpoint, operator)
    _add_payment(router, endpoint, operator)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    @router.get("", **listed(InvoiceSummaryDocument, OPERATOR_FILTERS))
    async def list_invoices(request: Request, caller: Annotated[OperatorCaller, operator]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_TIME,
            lambda session, page: InvoiceRepository(session).page(
                _filters(page.filters), page.after, page.fetch
            ),
            to_summary,
            OPERATOR_FILTERS,
        )

    @router.get(
        "/{invoice_id}",
        responses=RESPONSES,
        openapi_extra={"parameters": [FORMAT]},
    )
    async def get_invoice(
        invoice_id: str, request: Request, caller: Annotated[OperatorCaller, operator]
    ) -> Response:
        name = format_of(request)

        async def find(session: AsyncSession) -> InvoiceDetails:
            repository = InvoiceRepository(session)
            return await repository.details(await repository.by_id(invoice_id_of(invoice_id)))

        return formatted(await endpoint.query(caller, find), name)

    @router.post(
        "/preview",
        responses=documented(response=InvoiceDocument),
        openapi_extra=described(InvoiceOfMonth),
    )
    async def preview_invoice(
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[InvoiceOfMonth, request_model(InvoiceOfMonth)],
    ) -> Response:
        """What finalizing the month would lead to. It writes nothing."""

        async def work(session: AsyncSession) -> ApiResponse:
            month = Month.parse(body.month)
            found = await InvoiceRepository(session).preview(body.tenant_id, month, body.currency)
            return ApiResponse(200, to_response(found))

        return await endpoint.read(caller, work)


def _add_closing(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    @router.post(
        "/finalize",
        responses=documented(409, 422, response=InvoiceDocument),
        openapi_extra=described(InvoiceOfMonth, repeatable=True),
    )
    async def finalize_invoice(
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[InvoiceOfMonth, request_model(InvoiceOfMonth)],
    ) -> Response:
        """Make the invoice of a month final that is over, also within its grace. One that is final stays as it is."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            month = Month.parse(body.month)
            invoice = await invoices.finalize(uow, body.tenant_id, month, currency=body.currency)
            return await _answer(uow, invoice)

        return await endpoint.perform(request, caller, work)


def _add_payment(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    changed = documented(409, 422, response=InvoiceDocument)

    @router.post("/{invoice_id}/paid", responses=changed, openapi_extra=described(Payment, repeatable=True))
    async def record_payment(
        invoice_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[Payment, request_model(Payment)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            invoice = await invoices.pay(uow, invoice_id_of(invoice_id), body.reference)
            return await _answer(uow, invoice)

        return await endpoint.perform(request, caller, work)

    @router.post(
        "/{invoice_id}/void",
        responses=changed,
        openapi_extra=described(Nothing, optional_body=True, repeatable=True),
    )
    async def void_invoice(
        invoice_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[Nothing, request_model(Nothing, optional=True)],
    ) -> Response:
        """Cancel a final invoice. Its credits are given back; what it billed is billed again by the next one."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            invoice = await invoices.void(uow, invoice_id_of(invoice_id))
            return await _answer(uow, invoice)

        return await endpoint.perform(request, caller, work)


async def _answer(uow: UnitOfWork, invoice: Invoice) -> ApiResponse:
    return ApiResponse(200, to_response(await InvoiceRepository(uow.session).details(invoice)))


def _filters(given: Any) -> dict[str, Any]:
    """Read the filters of the listing. Raises `InvalidParameter`, `InvalidField`."""
    filters = checked_filters(given)
    if "tenant_id" in filters:
        try:
            filters["tenant_id"] = tenant_id_of(filters["tenant_id"])
        except TenantNotFound:
            raise InvalidParameter("`tenant_id` must be a UUID.", param="tenant_id") from None
    return filters
