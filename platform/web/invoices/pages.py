"""Billing of a tenant: `/console/billing`. Invariant: it reads only; what is billed follows from the usage ledger."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.page import AFTER, PageRequest, opens
from loraplex.platform.web.invoices.formats import FORMATS, saved
from loraplex.platform.web.invoices.queries import alerts, prices
from loraplex.platform.web.invoices.routes import INVOICE_ID
from loraplex.platform.web.overview.queries import spend
from loraplex.platform.web.sorting import BY_CREATION
from loraplex.tenants.errors import InvoiceNotFound
from loraplex.tenants.invoices import queries
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import InvoiceDocument, InvoiceLineDocument
from loraplex.tenants.scopes import BILLING_READ, USAGE_READ

Reader = Annotated[PageRequest, opens(BILLING_READ)]
PATH: Final = "/console/billing"
USAGE: Final = "/console/usage"
DRAFT: Final = "draft"

router = APIRouter()


@router.get(PATH)
async def show_billing(page: Reader) -> Response:
    tenant_id, now, part = page.tenant_id, datetime.now(UTC), page.part(BY_CREATION, parameter=AFTER)
    async with page.reading() as session:
        draft = await queries.draft(session, tenant_id, now)
        spent = await spend(session, tenant_id, draft.invoice.currency, now)
        found = await queries.invoices_with_drafts(session, tenant_id, {}, part)
        charged = await prices(session, tenant_id, now)
        credits = await queries.ranked_credits(session, tenant_id, now)
        crossed = await alerts(session, tenant_id)
    return page.show(
        "invoices/billing.html",
        draft=draft,
        forecast=spent.forecast,
        prices=charged,
        invoices=page.rows(part, found, parameter=AFTER),
        credits=credits,
        alerts=crossed,
    )


@router.get(f"{PATH}/invoices/{{invoice_id}}")
async def show_invoice(page: Reader, invoice_id: str) -> Response:
    return page.show(
        "invoices/invoice.html",
        invoice=await _invoice(page, invoice_id),
        address=f"{PATH}/invoices/{invoice_id}",
        usage_of=usage_links(page),
    )


@router.get(f"{PATH}/invoices/{{invoice_id}}/{{format_name}}")
async def download_invoice(page: Reader, invoice_id: str, format_name: str) -> Response:
    return download(await _invoice(page, invoice_id), format_name)


async def _invoice(page: PageRequest, name: str) -> InvoiceDocument:
    """Read an invoice by its id, or the one that the month which goes on would have, by the name `draft`."""
    if name == DRAFT:
        return (await page.query(queries.draft, page.tenant_id, datetime.now(UTC))).invoice
    return await page.query(queries.invoice, page.tenant_id, INVOICE_ID.parse(name))


def download(invoice: InvoiceDocument, name: str) -> Response:
    """Respond with an invoice as a file, or as a page that prints. Raises `InvoiceNotFound` for another format."""
    if name not in FORMATS:
        raise InvoiceNotFound(f"an invoice has no format {name[:20]!r}")
    return saved(invoice, name)


def usage_links(page: PageRequest) -> Callable[[InvoiceLineDocument], str | None]:
    """Return what gives the address of the usage that a line bills; None where the person may not see it."""

    def address(line: InvoiceLineDocument) -> str | None:
        if page.lacks(USAGE_READ) or line.token_class is None:
            return None
        month = Month.parse(line.month)
        days = {"from": f"{month.begin:%Y-%m-%d}", "to": f"{month.end - timedelta(days=1):%Y-%m-%d}"}
        if line.adapter_id is None:
            return f"{USAGE}?{urlencode({**days, 'base_model': 1})}"
        return f"{USAGE}?{urlencode(days if line.adapter is None else {**days, 'adapter': line.adapter})}"

    return address
