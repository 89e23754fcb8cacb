"""Invoices: drafts that are computed when they are read, final ones as they were stored.

Invariant: one transaction makes an invoice final, with its lines, its number and the credits it uses. Changes take the tenant's
billing lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid5

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InvoiceNotFound, InvoiceStateForbids
from loraplex.tenants.invoices.content import (
    InvoiceContent,
    compute_contents,
    compute_for_all,
    fill_in,
    line_rows,
    stored_content,
)
from loraplex.tenants.invoices.credits import CreditRepository
from loraplex.tenants.invoices.locks import lock_issuer
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.terms import billing_terms
from loraplex.tenants.models import Invoice, InvoiceNumber, Tenant
from loraplex.tenants.pages import Part, sliced

STATED: Final = (
    *("id", "tenant_id", "state", "number", "grace_ends_at"),
    *("finalized_at", "paid_at", "paid_reference", "voided_at"),
)
"""What the row of an invoice, its details and its document call the same."""
_IDS: Final = UUID("6f3c1e5a-52f4-4c0e-9d0a-7c1f5a0b8e16")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceDetails:
    """An invoice as it is shown. `number` and the times are None before they apply; `grace_ends_at` None: not even a draft."""

    id: UUID
    tenant_id: UUID
    month: Month
    state: str
    content: InvoiceContent
    number: int | None = None
    grace_ends_at: datetime | None = None
    finalized_at: datetime | None = None
    paid_at: datetime | None = None
    paid_reference: str | None = None
    voided_at: datetime | None = None


def invoice_id(tenant_id: UUID, month: Month, currency: str, attempt: int) -> UUID:
    """Return the id of an invoice: it is known before there is a draft, and the same for all who draft it."""
    return uuid5(_IDS, f"{tenant_id} {month} {currency} {attempt}")


class InvoiceRepository:
    """The invoices of one tenant; None: of all. Only an operator's session may change them."""

    def __init__(self, session: AsyncSession, tenant_id: UUID | None = None) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def by_id(self, identity: UUID) -> Invoice:
        """Read it again even if the session has it: another transaction may have changed it. Raises `InvoiceNotFound`."""
        invoice = await self._session.get(Invoice, identity, populate_existing=True)
        if invoice is None or self._tenant_id not in (None, invoice.tenant_id):
            raise InvoiceNotFound(f"no invoice {identity}")
        return invoice

    async def living(self, tenant_id: UUID, month: Month, currency: str) -> Invoice | None:
        """Return the invoice of a month that is not void."""
        query = select(Invoice).where(Invoice.state != "void", *_of_month(tenant_id, month, currency))
        return (await self._session.scalars(query.execution_options(populate_existing=True))).one_or_none()

    async def attempts(self, tenant_id: UUID, month: Month, currency: str) -> int:
        """Return the number of a month's invoices, void ones too."""
        query = select(func.count()).select_from(Invoice).where(*_of_month(tenant_id, month, currency))
        return (await self._session.scalars(query)).one()

    async def page(
        self, filters: Mapping[str, Any], after: tuple[datetime, UUID] | None, limit: int
    ) -> Sequence[Invoice]:
        """Return at most `limit` invoices, newest first. `filters`: columns of `Invoice` and the value each must have."""
        query = select(Invoice).where(*(getattr(Invoice, name) == value for name, value in filters.items()))
        if self._tenant_id is not None:
            query = query.where(Invoice.tenant_id == self._tenant_id)
        query = sliced(query, Part(limit, after), Invoice.created_at, Invoice.id, newest_first=True)
        return (await self._session.scalars(query)).all()

    async def due(self, now: datetime) -> Sequence[Invoice]:
        """Return the drafts whose grace has ended, in the order of its end."""
        query = select(Invoice).where(Invoice.state == "draft", Invoice.grace_ends_at <= now)
        return (await self._session.scalars(query.order_by(Invoice.grace_ends_at, Invoice.id))).all()

    async def customers(self, month: Month) -> Sequence[UUID]:
        """Return the tenants that existed before the end of the month, deleted ones too: they may have used something."""
        query = select(Tenant.id).where(Tenant.created_at < month.end).order_by(Tenant.id)
        return (await self._session.scalars(query)).all()

    async def draft(
        self, tenant_id: UUID, month: Month, currency: str, attempt: int, grace_ends_at: datetime
    ) -> Invoice:
        """Write a draft, under the tenant's lock."""
        invoice = Invoice(
            id=invoice_id(tenant_id, month, currency, attempt),
            tenant_id=tenant_id,
            month=str(month),
            currency=currency,
            attempt=attempt,
            state="draft",
            grace_ends_at=grace_ends_at,
        )
        self._session.add(invoice)
        await self._session.flush()
        return invoice

    async def finalize(self, invoice: Invoice, content: InvoiceContent) -> None:
        """Store the content of a draft, use its credits and number it, under the tenant's lock.

        Raises `InvoiceStateForbids` unless it is a draft.
        """
        require_state(invoice, "draft")
        self._session.add_all(line_rows(invoice, content))
        await self._session.flush()
        await CreditRepository(self._session, invoice.tenant_id).use(invoice.id, content.totals.credit_uses)
        # Not `now()`, when the transaction began: it may have waited for the lock, and has billed what was written meanwhile.
        finalized_at = await self._session.scalar(select(func.clock_timestamp()))
        number = await self._next_number(content.terms.issuer)
        fill_in(invoice, content)
        invoice.state, invoice.finalized_at, invoice.number = "final", finalized_at, number
        await self._session.flush()

    async def _next_number(self, issuer: str) -> int:
        """Take the issuer's next number. A transaction that fails gives it back."""
        await lock_issuer(self._session, issuer)
        statement = insert(InvoiceNumber).values(issuer=issuer, last_number=1)
        statement = statement.on_conflict_do_update(
            index_elements=["issuer"], set_={"last_number": InvoiceNumber.last_number + 1}
        )
        return (await self._session.scalars(statement.returning(InvoiceNumber.last_number))).one()

    async def preview(self, tenant_id: UUID, month: Month, currency: str | None) -> InvoiceDetails:
        """Return what finalizing the month would lead to, and write nothing: the month's invoice, or what it would be.

        `currency` None: that of the tenant in the month. Raises `TenantNotFound`.
        """
        chosen = currency or (await billing_terms(self._session, tenant_id, month)).currency
        invoice = await self.living(tenant_id, month, chosen)
        if invoice is not None:
            return await self.details(invoice)
        contents = await compute_contents(self._session, tenant_id, month, (chosen,))
        identity = invoice_id(tenant_id, month, chosen, await self.attempts(tenant_id, month, chosen))
        return InvoiceDetails(
            id=identity, tenant_id=tenant_id, month=month, state="draft", content=contents[chosen]
        )

    async def draft_totals(self, invoices: Iterable[Invoice]) -> dict[UUID, int]:
        """Return by id what each draft among the invoices would come to now, in micro-units: one computation per month."""
        drafts = [each for each in invoices if each.state == "draft"]
        totals: dict[UUID, int] = {}
        for month in {each.month for each in drafts}:
            of_month = [each for each in drafts if each.month == month]
            currencies: dict[UUID, set[str]] = {}
            for each in of_month:
                currencies.setdefault(each.tenant_id, set()).add(each.currency)
            contents = await compute_for_all(self._session, Month.parse(month), currencies)
            totals |= {
                each.id: contents[each.tenant_id, each.currency].totals.total_micro for each in of_month
            }
        return totals

    async def details(self, invoice: Invoice) -> InvoiceDetails:
        """Return the invoice as it is shown: a draft is computed now."""
        if invoice.state == "draft":
            month, currencies = Month.parse(invoice.month), (invoice.currency,)
            computed = await compute_contents(self._session, invoice.tenant_id, month, currencies)
            content = computed[invoice.currency]
        else:
            content = await stored_content(self._session, invoice)
        return details_of(invoice, content)


def details_of(invoice: Invoice, content: InvoiceContent) -> InvoiceDetails:
    """Return the invoice with what it bills."""
    stated = {name: getattr(invoice, name) for name in STATED}
    return InvoiceDetails(month=Month.parse(invoice.month), content=content, **stated)


def require_state(invoice: Invoice, state: str) -> None:
    """Raises `InvoiceStateForbids` for an invoice in another state."""
    if invoice.state != state:
        raise InvoiceStateForbids(f"the invoice is {invoice.state}; this step needs a {state} one")


def _of_month(tenant_id: UUID, month: Month, currency: str) -> tuple[ColumnElement[bool], ...]:
    return Invoice.tenant_id == tenant_id, Invoice.month == str(month), Invoice.currency == currency
