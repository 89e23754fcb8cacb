"""Invoices of all tenants: preview, finalize, record a payment, void. Invariant: a preview writes nothing; voiding asks for the tenant's name."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Final
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.billing import invoices as use_cases
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.confirmation import Confirmation
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.invoices import queries as billing
from loraplex.platform.web.invoices.pages import formatted, invoice_context
from loraplex.tenants.accounts.queries import tenant_named
from loraplex.tenants.unit_of_work import UnitOfWork

PATH: Final = "/operator/console/invoices"
PAGE: Final = 50
SentForm = Annotated[Form, Depends(read_form)]


class MonthForm(BaseModel):
    """A month of a tenant. `currency` None: that of the tenant in the month."""

    tenant: str
    month: str
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None

    async def preview(self, session: AsyncSession) -> billing.InvoiceDetails:
        """Raises `InvalidField`."""
        tenant_id = await tenant_named(session, self.tenant)
        return await billing.preview(session, tenant_id, self.month, self.currency)

    async def finalize(self, uow: UnitOfWork) -> UUID:
        """Return the id. Raises what `invoices.finalize` raises."""
        month, tenant_id = billing.month_of(self.month), await tenant_named(uow.session, self.tenant)
        return (await use_cases.finalize(uow, tenant_id, month, currency=self.currency)).id


class PaymentForm(BaseModel):
    """What a payment is found by."""

    reference: Annotated[str, Field(max_length=use_cases.MAX_REFERENCE)]


def invoices_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of invoices."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())
    _add_list(router, endpoint, operator)
    _add_closing(router, endpoint, operator)
    _add_invoice(router, endpoint, operator)
    _add_void(router, endpoint, operator)
    return router


def _add_list(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    @router.get(PATH)
    async def list_invoices(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        given = {name: request.query_params.get(name, "").strip() for name in ("tenant", "state", "month")}
        chosen = {name: text for name, text in given.items() if text}
        after = request.query_params.get("after")

        async def find(found: AsyncSession) -> tuple[billing.InvoicePage, Mapping[UUID, str]]:
            tenant_id = await tenant_named(found, chosen["tenant"]) if "tenant" in chosen else None
            filters = {name: text for name, text in chosen.items() if name != "tenant"}
            page = await billing.invoices(found, tenant_id, filters, after, PAGE)
            return page, await billing.customers(found, page.rows)

        form, status = Entered(given), 200
        try:
            with field_errors():
                page, names = await endpoint.query(session, find)
        except FormInvalid as invalid:
            form, status = Entered(given, errors=invalid.errors), 422
            page, names = billing.InvoicePage(rows=(), older=None), {}
        older = None if page.older is None else f"{PATH}?{urlencode({**chosen, 'after': page.older})}"
        return endpoint.page(
            request,
            session,
            "invoices/operator_invoices.html",
            status=status,
            page=page,
            names=names,
            form=form,
            older=older,
            newest=None if after is None else f"{PATH}?{urlencode(chosen)}",
        )


def _add_closing(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    def shown(
        request: Request,
        session: ConsoleSession,
        form: Entered,
        invoice: billing.InvoiceDetails | None = None,
        status: int = 200,
    ) -> Response:
        """Show the form, and the preview once there is one."""
        context = {} if invoice is None else invoice_context(invoice, "")
        return endpoint.page(
            request,
            session,
            "invoices/close_month.html",
            status=status,
            **{"invoice": None, **context, "form": form, "usage_of": _no_usage},
        )

    @router.get(f"{PATH}/close")
    async def choose_month(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        given = {name: request.query_params.get(name, "") for name in MonthForm.model_fields}
        return shown(request, session, Entered(given))

    @router.post(f"{PATH}/preview")
    async def preview_invoice(
        request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        try:
            chosen = parse(form, MonthForm)
            with field_errors():
                invoice = await endpoint.query(session, chosen.preview)
        except FormInvalid as invalid:
            return shown(request, session, form.entered(invalid.errors), status=422)
        return shown(request, session, form.entered(), invoice)

    @router.post(PATH)
    async def finalize_invoice(
        request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        try:
            chosen = parse(form, MonthForm)
            with field_errors():
                identity = await endpoint.perform(request, session, form, chosen.finalize, UUID)
        except FormInvalid as invalid:
            return shown(request, session, form.entered(invalid.errors), status=422)
        return endpoint.back(
            request, session, f"{PATH}/{identity}", "The invoice is final and has its number."
        )


def _add_invoice(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    async def shown(
        request: Request, session: ConsoleSession, invoice_id: str, form: Entered | None, status: int = 200
    ) -> Response:
        async def find(found: AsyncSession) -> tuple[billing.InvoiceDetails, str]:
            invoice = await billing.invoice(found, None, invoice_id)
            return invoice, (await billing.customers(found, [invoice]))[invoice.tenant_id]

        invoice, tenant = await endpoint.query(session, find)
        address = f"{PATH}/{invoice.id}"
        context = invoice_context(invoice, address)
        return endpoint.page(
            request,
            session,
            "invoices/operator_invoice.html",
            status=status,
            **context,
            tenant=tenant,
            address=address,
            form=form,
            usage_of=_no_usage,
        )

    @router.get(f"{PATH}/{{invoice_id}}")
    async def show_invoice(
        invoice_id: str, request: Request, session: Annotated[ConsoleSession, operator]
    ) -> Response:
        return await shown(request, session, invoice_id, None)

    @router.post(f"{PATH}/{{invoice_id}}/paid")
    async def record_payment(
        invoice_id: str, request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        identity = billing.invoice_id_of(invoice_id)
        try:
            payment = parse(form, PaymentForm)
            with field_errors():
                await endpoint.perform(
                    request, session, form, lambda uow: use_cases.pay(uow, identity, payment.reference)
                )
        except FormInvalid as invalid:
            return await shown(request, session, invoice_id, form.entered(invalid.errors), 422)
        return endpoint.back(request, session, f"{PATH}/{identity}", "The payment is recorded.")

    @router.get(f"{PATH}/{{invoice_id}}/{{format_name}}")
    async def download_invoice(
        invoice_id: str, format_name: str, session: Annotated[ConsoleSession, operator]
    ) -> Response:
        return formatted(
            await endpoint.query(session, lambda found: billing.invoice(found, None, invoice_id)), format_name
        )


def _add_void(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    asked = _void_confirmation(endpoint)

    @router.get(f"{PATH}/{{invoice_id}}/actions/void")
    async def ask_void(
        invoice_id: str, request: Request, session: Annotated[ConsoleSession, operator]
    ) -> Response:
        confirmation = await asked(session, invoice_id)
        return endpoint.page(request, session, "tenants/confirm.html", **confirmation.context())

    @router.post(f"{PATH}/{{invoice_id}}/actions/void")
    async def void_invoice(
        invoice_id: str, request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        confirmation = await asked(session, invoice_id)
        identity = billing.invoice_id_of(invoice_id)
        try:
            confirmation.require(form)
            with field_errors():
                await endpoint.perform(request, session, form, lambda uow: use_cases.void(uow, identity))
        except FormInvalid as invalid:
            context = confirmation.context(form.entered(invalid.errors))
            return endpoint.page(request, session, "tenants/confirm.html", status=422, **context)
        return endpoint.back(
            request, session, confirmation.back, "The invoice is void; its credits are back."
        )


def _void_confirmation(
    endpoint: ConsoleEndpoint,
) -> Callable[[ConsoleSession, str], Awaitable[Confirmation]]:
    async def asked(session: ConsoleSession, invoice_id: str) -> Confirmation:
        async def find(found: AsyncSession) -> tuple[billing.InvoiceDetails, str]:
            invoice = await billing.invoice(found, None, invoice_id)
            return invoice, (await billing.customers(found, [invoice]))[invoice.tenant_id]

        invoice, tenant = await endpoint.query(session, find)
        return Confirmation(
            title=f"Void invoice {invoice.number or 'draft'} of {tenant}?",
            consequence="It keeps its number and is shown as void. The credits it used are given back, and what it billed is"
            " billed again by the next invoice.",
            action=f"{PATH}/{invoice.id}/actions/void",
            verb="Void invoice",
            keep="Keep it",
            back=f"{PATH}/{invoice.id}",
            path=f"/invoices/{invoice.id}/void",
            typed=tenant,
        )

    return asked


def _no_usage(line: billing.InvoiceLine) -> None:
    """Operators see the usage of all tenants on a page of their own."""
