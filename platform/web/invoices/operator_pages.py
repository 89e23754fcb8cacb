"""Invoices of all tenants: preview, finalize, record a payment, void. Invariant: a preview writes nothing; voiding
asks for the tenant's name.
"""

from collections.abc import Mapping
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.web.console.confirmation import Confirmation
from loraplex.platform.web.console.form_routes import FormSubmission, form_page, form_post, submits_operator
from loraplex.platform.web.console.forms import Entered, FormInvalid, field_errors
from loraplex.platform.web.console.page import AFTER, PageRequest, Rows, opens_operator
from loraplex.platform.web.invoices.pages import download
from loraplex.platform.web.invoices.routes import InvoiceId
from loraplex.platform.web.sorting import BY_CREATION
from loraplex.tenants.accounts.queries import tenant_named
from loraplex.tenants.invoices import queries, use_cases
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import MAX_REFERENCE, InvoiceDocument, TenantInvoice
from loraplex.tenants.unit_of_work import UnitOfWork

Operator = Annotated[PageRequest, opens_operator()]
Submission = Annotated[FormSubmission, submits_operator()]
PATH: Final = "/operator/console/invoices"
ONE: Final = f"{PATH}/{{invoice_id}}"
FILTERS: Final = ("tenant", "state", "month")

router = APIRouter()


class MonthForm(BaseModel):
    """A month of a tenant. `currency` None: that of the tenant in the month."""

    tenant: str
    month: str
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None

    async def preview(self, session: AsyncSession) -> InvoiceDocument:
        """Return what finalizing would lead to. Raises `InvalidField`."""
        tenant_id = await tenant_named(session, self.tenant)
        return await queries.preview(session, tenant_id, Month.parse(self.month), self.currency)

    async def finalize(self, uow: UnitOfWork) -> UUID:
        """Return the id. Raises what `use_cases.finalize` raises."""
        month, tenant_id = Month.parse(self.month), await tenant_named(uow.session, self.tenant)
        return (await use_cases.finalize(uow, tenant_id, month, currency=self.currency)).id


class PaymentForm(BaseModel):
    """What a payment is found by."""

    reference: Annotated[str, Field(max_length=MAX_REFERENCE)]


@router.get(PATH)
async def list_invoices(page: Operator) -> Response:
    given = {name: page.http.query_params.get(name, "").strip() for name in FILTERS}
    filters = {name: text for name, text in given.items() if text}
    tenant, part = filters.pop("tenant", None), page.part(BY_CREATION, parameter=AFTER)
    invoices: Rows[TenantInvoice] = Rows((), None, None, {})
    errors: Mapping[str, str] = {}
    try:
        with field_errors():
            found = await page.query(queries.invoices_of_all, tenant, filters, part)
        invoices = page.rows(part, found, parameter=AFTER)
    except FormInvalid as invalid:
        errors = invalid.errors
    return page.show(
        "invoices/operator_invoices.html",
        invoices=invoices,
        form=Entered(given, errors=errors),
    )


@router.get(f"{PATH}/close")
async def choose_month(page: Operator) -> Response:
    given = {name: page.http.query_params.get(name, "") for name in MonthForm.model_fields}
    return page.show("invoices/close_month.html", form=Entered(given), invoice=None)


async def _month_again(submission: Submission, form: Entered) -> Response:
    return submission.show("invoices/close_month.html", form=form, invoice=None)


@form_post(router, f"{PATH}/preview", _month_again)
async def preview_invoice(submission: Submission) -> Response:
    invoice = await submission.query(submission.parse(MonthForm).preview)
    return submission.show("invoices/close_month.html", form=submission.form.entered(), invoice=invoice)


@form_post(router, PATH, _month_again)
async def finalize_invoice(submission: Submission) -> Response:
    invoice_id = await submission.result(submission.parse(MonthForm).finalize)
    return submission.back(f"{PATH}/{invoice_id}", "The invoice is final and has its number.")


async def _show(page: PageRequest, refused: Entered | None, invoice_id: UUID) -> Response:
    """Show an invoice; `refused`: a payment that was not recorded. Raises `InvoiceNotFound`."""
    invoice, tenant = await page.query(queries.invoice_with_tenant, invoice_id)
    return page.show(
        "invoices/operator_invoice.html",
        invoice=invoice,
        tenant=tenant,
        address=f"{PATH}/{invoice_id}",
        form=refused,
    )


@router.get(ONE)
async def show_invoice(page: Operator, invoice_id: InvoiceId) -> Response:
    return await _show(page, None, invoice_id)


@form_post(router, f"{ONE}/paid", _show)
async def record_payment(submission: Submission, invoice_id: InvoiceId) -> Response:
    await submission.run(use_cases.pay, invoice_id, submission.parse(PaymentForm).reference)
    return submission.back(f"{PATH}/{invoice_id}", "The payment is recorded.")


@router.get(f"{ONE}/{{format_name}}")
async def download_invoice(page: Operator, invoice_id: InvoiceId, format_name: str) -> Response:
    return download(await page.query(queries.invoice, None, invoice_id), format_name)


async def _void(page: PageRequest, invoice_id: UUID) -> Confirmation:
    invoice, tenant = await page.query(queries.invoice_with_tenant, invoice_id)
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


async def void_form(page: Operator, invoice_id: InvoiceId) -> dict[str, object]:
    """Return what asks before an invoice is void. Raises `InvoiceNotFound`."""
    return {"asked": await _void(page, invoice_id)}


@form_page(router, f"{ONE}/actions/void", "tenants/confirm.html", void_form, fields=("typed",))
async def void_invoice(submission: Submission, invoice_id: InvoiceId) -> Response:
    (await _void(submission, invoice_id)).require(submission.form)
    await submission.run(use_cases.void, invoice_id)
    return submission.back(f"{PATH}/{invoice_id}", "The invoice is void; its credits are back.")
