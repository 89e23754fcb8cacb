"""Reads invoices and credits: of one tenant, or of all in the role of an operator."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.queries import tenant_named
from loraplex.tenants.accounts.tenants import TenantRepository, names_of
from loraplex.tenants.invoices.credits import CreditRepository, available, credit_document
from loraplex.tenants.invoices.document import invoice_document
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import (
    CreditDocument,
    InvoiceDocument,
    InvoiceSummaryDocument,
    MonthDraft,
    RankedCredit,
    TenantCredit,
    TenantInvoice,
)
from loraplex.tenants.invoices.tables import CreditGrant
from loraplex.tenants.invoices.totals import is_usable
from loraplex.tenants.pages import Part, Slice, sliced

MAX_RANKED: Final = 200
"""The newest credits of a tenant that are ranked."""
Position = tuple[datetime, UUID]


async def invoices(
    session: AsyncSession, tenant_id: UUID | None, filters: Mapping[str, Any], part: Slice[Position]
) -> list[InvoiceSummaryDocument]:
    """Return invoices, the newest first; of all tenants for None. `filters`: columns, and the value each must have."""
    found = await InvoiceRepository(session, tenant_id).page(filters, part.after, part.fetch)
    return [*map(InvoiceSummaryDocument.of, found)]


async def invoices_with_drafts(
    session: AsyncSession, tenant_id: UUID | None, filters: Mapping[str, Any], part: Slice[Position]
) -> list[InvoiceSummaryDocument]:
    """Return invoices as `invoices` does, but a draft has the total that it would have now."""
    repository = InvoiceRepository(session, tenant_id)
    found = await repository.page(filters, part.after, part.fetch)
    # The last one only shows that there are more.
    totals = await repository.draft_totals(found[: part.fetch - 1])
    summaries = map(InvoiceSummaryDocument.of, found)
    return [
        each.model_copy(update={"total_micro": totals.get(each.id, each.total_micro)}) for each in summaries
    ]


async def invoice(session: AsyncSession, tenant_id: UUID | None, invoice_id: UUID) -> InvoiceDocument:
    """Return one invoice, of any tenant for None; a draft as it would be now. Raises `InvoiceNotFound`."""
    repository = InvoiceRepository(session, tenant_id)
    return invoice_document(await repository.details(await repository.by_id(invoice_id)))


async def invoices_of_all(
    session: AsyncSession, tenant: str | None, filters: Mapping[str, Any], part: Slice[Position]
) -> list[TenantInvoice]:
    """Return invoices as `invoices_with_drafts` does, with their tenants' names, as an operator. `tenant`: only those of the one
    with this name. Raises `InvalidField` for one that does not exist.
    """
    tenant_id = None if tenant is None else await tenant_named(session, tenant)
    found = await invoices_with_drafts(session, tenant_id, filters, part)
    names = await names_of(session, {each.tenant_id for each in found})
    return [TenantInvoice(**dict(each), tenant=names[each.tenant_id]) for each in found]


async def invoice_with_tenant(session: AsyncSession, invoice_id: UUID) -> tuple[InvoiceDocument, str]:
    """Return one invoice and the name of its tenant, as an operator. Raises `InvoiceNotFound`."""
    found = await invoice(session, None, invoice_id)
    return found, (await names_of(session, {found.tenant_id}))[found.tenant_id]


async def draft(session: AsyncSession, tenant_id: UUID, now: datetime) -> MonthDraft:
    """Return what the invoice of this month would be now; nothing is written. Raises `TenantNotFound`."""
    month = Month.of(now)
    left = month.end - now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return MonthDraft(invoice=await preview(session, tenant_id, month), days_left=left // timedelta(days=1))


async def preview(
    session: AsyncSession, tenant_id: UUID, month: Month, currency: str | None = None
) -> InvoiceDocument:
    """Return what finalizing a month would lead to; nothing is written. `currency` None: that of the tenant in the month.

    Raises `TenantNotFound`.
    """
    return invoice_document(await InvoiceRepository(session, tenant_id).preview(tenant_id, month, currency))


async def credits(session: AsyncSession, tenant_id: UUID, part: Slice[UUID]) -> list[CreditDocument]:
    """Return the credits of a tenant with what is left of each, the newest first."""
    query = select(CreditGrant, available()).where(CreditGrant.tenant_id == tenant_id)
    rows = await session.execute(sliced(query, part, CreditGrant.id, newest_first=True))
    return [credit_document(grant, int(left)) for grant, left in rows]


async def credits_of_tenant(
    session: AsyncSession, tenant_id: UUID, part: Slice[UUID]
) -> list[CreditDocument]:
    """Return credits as `credits` does, as an operator. Raises `TenantNotFound`."""
    await TenantRepository(session).by_id(tenant_id)
    return await credits(session, tenant_id, part)


async def credits_of_all(session: AsyncSession, part: Slice[UUID]) -> list[TenantCredit]:
    """Return the credits of all tenants, the newest first, as an operator."""
    query = sliced(select(CreditGrant, available()), part, CreditGrant.id, newest_first=True)
    rows = (await session.execute(query)).all()
    names = await names_of(session, {grant.tenant_id for grant, _ in rows})
    return [
        TenantCredit(
            **dict(credit_document(grant, int(left))),
            tenant_id=grant.tenant_id,
            tenant=names[grant.tenant_id],
        )
        for grant, left in rows
    ]


async def ranked_credits(session: AsyncSession, tenant_id: UUID, now: datetime) -> list[RankedCredit]:
    """Return the newest credits: those that can still pay in the order in which invoices use them, then the others."""
    repository, month = CreditRepository(session, tenant_id), Month.of(now)
    found = await credits(session, tenant_id, Part(MAX_RANKED))
    places: dict[UUID, int] = {}
    for currency in {each.currency for each in found}:
        usable = [each for each in await repository.balances(currency) if is_usable(each, month)]
        ordered = sorted(usable, key=lambda each: each.burn_order)
        places |= {each.grant_id: place for place, each in enumerate(ordered, start=1)}
    ranked = [RankedCredit(**dict(each), place=places.get(each.id)) for each in found]
    return sorted(ranked, key=lambda each: (each.place is None, each.currency, each.place or 0))
