"""Billing of a tenant: `/console/billing`. Invariant: it reads only; what is billed follows from the usage ledger."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.billing import invoice_formats
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.legacy_forms import tenant_of
from loraplex.platform.web.invoices import queries as billing
from loraplex.platform.web.overview.forecast import SpendForecast
from loraplex.platform.web.overview.queries import spend

PATH: Final = "/console/billing"
SCOPE: Final = "billing:read"
USAGE: Final = "/console/usage"
DRAFT: Final = "draft"
PAGE: Final = 50
FORMATS: Final = ("html", "json", "csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All parts of the page, read in one transaction."""

    draft: billing.Draft
    prices: billing.Prices
    invoices: billing.InvoicePage
    credits: tuple[billing.CreditRow, ...]
    alerts: tuple[billing.AlertRow, ...]
    forecast: SpendForecast | None


def billing_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of billing."""
    router = APIRouter()
    reader = Depends(endpoint.requires(SCOPE))

    @router.get(PATH)
    async def show_billing(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        after = request.query_params.get("after")
        overview = await endpoint.query(session, lambda found: _overview(found, session, after))
        older = _older(overview.invoices)
        return endpoint.page(
            request, session, "invoices/billing.html", overview=overview, older=older, first=after is None
        )

    @router.get(PATH + "/invoices/{invoice_id}")
    async def show_invoice(
        invoice_id: str, request: Request, session: Annotated[ConsoleSession, reader]
    ) -> Response:
        found = await _invoice(endpoint, session, invoice_id)
        context = invoice_context(found, f"{PATH}/invoices/{invoice_id}")
        context["usage_of"] = usage_links(session, found)
        return endpoint.page(request, session, "invoices/invoice.html", **context)

    @router.get(PATH + "/invoices/{invoice_id}/{format_name}")
    async def download_invoice(
        invoice_id: str, format_name: str, session: Annotated[ConsoleSession, reader]
    ) -> Response:
        return formatted(await _invoice(endpoint, session, invoice_id), format_name)

    return router


async def _overview(session: AsyncSession, viewer: ConsoleSession, after: str | None) -> Overview:
    tenant_id, now = tenant_of(viewer), datetime.now(UTC)
    draft = await billing.draft(session, tenant_id, now)
    return Overview(
        draft=draft,
        forecast=(await spend(session, tenant_id, draft.currency, now)).forecast,
        prices=await billing.prices(session, tenant_id, now),
        invoices=await billing.invoices(session, tenant_id, {}, after, PAGE),
        credits=await billing.credits(session, tenant_id, now),
        alerts=tuple(await billing.alerts(session, tenant_id)),
    )


async def _invoice(
    endpoint: ConsoleEndpoint, session: ConsoleSession, invoice_id: str
) -> billing.InvoiceDetails:
    """Read an invoice by its id, or the one that the month which goes on would have, by the name `draft`."""

    async def find(found: AsyncSession) -> billing.InvoiceDetails:
        if invoice_id == DRAFT and session.tenant_id is not None:
            return (await billing.draft(found, session.tenant_id, datetime.now(UTC))).invoice
        return await billing.invoice(found, session.tenant_id, invoice_id)

    return await endpoint.query(session, find)


def _older(page: billing.InvoicePage) -> str | None:
    return None if page.older is None else f"{PATH}?{urlencode({'after': page.older})}"


def invoice_context(details: billing.InvoiceDetails, address: str) -> dict[str, Any]:
    """Return what the template of an invoice reads; `address` is its own page."""
    return {
        "invoice": details,
        "terms": details.content.terms,
        "totals": details.content.totals,
        "adapters": details.content.adapters,
        "title": "Draft" if details.number is None else f"Invoice {details.number}",
        "downloads": [(name, f"{address}/{name}") for name in FORMATS],
    }


def usage_links(
    session: ConsoleSession, invoice: billing.InvoiceDetails
) -> Callable[[billing.InvoiceLine], str | None]:
    """Return what gives the address of the usage that a line bills; None where the person may not see it."""
    may_see = "usage:read" in session.scopes

    def address(line: billing.InvoiceLine) -> str | None:
        if not may_see or line.token_class is None:
            return None
        last = line.month.end - timedelta(days=1)
        days = {"from": f"{line.month.begin:%Y-%m-%d}", "to": f"{last:%Y-%m-%d}"}
        if line.adapter_id is None:
            return f"{USAGE}?{urlencode({**days, 'base_model': 1})}"
        name = invoice.content.adapters.get(line.adapter_id)
        return f"{USAGE}?{urlencode(days if name is None else {**days, 'adapter': name})}"

    return address


def formatted(details: billing.InvoiceDetails, name: str) -> Response:
    """Answer an invoice as a file, or as a page that prints. Raises `InvoiceNotFound` for another format."""
    document = billing.document(details)
    file = f"invoice-{details.id}.{name}"
    saved = {"content-disposition": f'attachment; filename="{file}"'}
    match name:
        case "json":
            return Response(msgspec.json.encode(document), headers=saved, media_type="application/json")
        case "csv":
            return Response(invoice_formats.invoice_csv(document), headers=saved, media_type="text/csv")
        case "html":
            policy = {"content-security-policy": invoice_formats.CONTENT_SECURITY_POLICY}
            return Response(invoice_formats.invoice_html(document), headers=policy, media_type="text/html")
    raise billing.InvoiceNotFound(f"an invoice has no format {name[:20]!r}")
