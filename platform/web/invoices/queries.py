"""Billing as a tenant sees it: its prices, the month that goes on, its invoices, credits and crossed budgets.

Invariant: every amount is an integer, in micro-units unless its name says pico-units.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.services.billing import rate_cards
from loraplex.tenants.accounts.tenants import TenantRepository, names_of
from loraplex.tenants.billing.preview import RatedUsage
from loraplex.tenants.billing.rate_cards import CardVersion, RateCards
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.errors import InvalidField, InvoiceNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.invoices.credits import (
    DEFAULT_PRIORITY,
    CreditRepository,
    GrantedCredit,
    newest_grants,
)
from loraplex.tenants.invoices.document import invoice_document
from loraplex.tenants.invoices.invoices import InvoiceDetails, InvoiceRepository
from loraplex.tenants.invoices.lines import InvoiceLine
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.totals import is_usable
from loraplex.tenants.models import Invoice
from loraplex.tenants.quotas.limits import BUDGETS
from loraplex.tenants.quotas.threshold_events import Event, quota_events

__all__ = [
    "DEFAULT_PRIORITY",
    "AlertRow",
    "CardVersion",
    "Coming",
    "CreditRow",
    "Draft",
    "GrantPage",
    "GrantRow",
    "InvoiceDetails",
    "InvoiceLine",
    "InvoiceNotFound",
    "InvoicePage",
    "InvoiceRow",
    "Prices",
    "alerts",
    "credits",
    "customers",
    "document",
    "draft",
    "grants",
    "invoice",
    "invoice_id_of",
    "invoices",
    "month_of",
    "preview",
    "prices",
]

SPECIFICITY: Final = ("all", "tier", "tenant")
"""Scopes of cards that cover the base model, the most specific last."""
MAX_ALERTS: Final = 10
MAX_CREDITS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """A price that begins later, and what it changes: last month's usage as billed and under it. `None`: no usage then."""

    version: CardVersion
    last_month: RatedUsage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a tenant. `general`: what applies where no adapter has a card of its own; None: nothing has a price.

    `next_currency` replaces `currency` on `next_currency_from`, 00:00 UTC.
    """

    currency: str
    next_currency: str | None
    next_currency_from: date | None
    general: CardVersion | None
    of_adapters: tuple[CardVersion, ...]
    coming: tuple[Coming, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The month that goes on, as its invoice would be now. `days_left` counts the days that are not over, this one too."""

    invoice: InvoiceDetails
    days_left: int

    @property
    def currency(self) -> str:
        return self.invoice.content.terms.currency


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceRow:
    """One invoice of a list. `number` is None for a draft, whose total is computed now."""

    id: UUID
    tenant_id: UUID
    number: int | None
    month: str
    currency: str
    state: str
    total_micro: int
    created_at: datetime
    finalized_at: datetime | None
    paid_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoicePage:
    """Invoices, the newest first. `older`: the id behind which the next page begins; None for the last."""

    rows: tuple[InvoiceRow, ...]
    older: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRow:
    """A grant and what is left of it. `place`: its turn among those that can still pay in its currency; None: it pays no more."""

    id: UUID
    tenant_id: UUID
    currency: str
    granted_micro: int
    left_micro: int
    priority: int
    reason: str
    granted_at: datetime
    expires_at: datetime | None
    place: int | None


@dataclass(frozen=True, slots=True)
class GrantRow:
    """A grant among those of all tenants; its place is not computed."""

    tenant: str
    credit: CreditRow


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantPage:
    """Grants of all tenants, the newest first. `older`: the id behind which the next page begins; None for the last."""

    rows: tuple[GrantRow, ...]
    older: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRow:
    """A budget whose use crossed a threshold, in percent. `subject`: the key or the adapter; None for the whole tenant."""

    at: datetime
    level: str
    subject: str | None
    period: str
    threshold: int
    used_micro: int
    budget_micro: int


async def prices(session: AsyncSession, tenant_id: UUID, now: datetime) -> Prices:
    """Read the prices that apply now and those that begin later, in the tenant's currency and the next one.

    Raises `TenantNotFound`.
    """
    tenant = await TenantRepository(session).by_id(tenant_id)
    data = await TenantBillings(session).get(tenant_id)
    currencies = [each for each in (data.currency, data.next_currency) if each is not None]
    standing = await RateCards(session).standing(tenant_id, tenant.tier, currencies, now)
    begun = [each for each in standing if each.effective_from <= now and each.key.currency == data.currency]
    general = [each for each in begun if each.scope in SPECIFICITY]
    return Prices(
        currency=data.currency,
        next_currency=data.next_currency,
        next_currency_from=data.next_currency_from,
        general=max(general, key=lambda each: SPECIFICITY.index(each.scope), default=None),
        of_adapters=tuple(each for each in begun if each.scope == "adapter"),
        coming=tuple(
            [await _coming(session, each, tenant_id) for each in standing if each.effective_from > now]
        ),
    )


async def _coming(session: AsyncSession, version: CardVersion, tenant_id: UUID) -> Coming:
    preview = await rate_cards.preview(session, version.key, version.price)
    of_tenant = (
        each
        for each in preview.rated
        if each.tenant_id == tenant_id and each.currency == version.key.currency
    )
    return Coming(version=version, last_month=next(of_tenant, None))


async def draft(session: AsyncSession, tenant_id: UUID, now: datetime) -> Draft:
    """Compute what the invoice of this month would be now; nothing is written. Raises `TenantNotFound`."""
    month = Month.of(now)
    details = await InvoiceRepository(session, tenant_id).preview(tenant_id, month, None)
    left = month.end - now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return Draft(invoice=details, days_left=left // timedelta(days=1))


async def invoices(
    session: AsyncSession,
    tenant_id: UUID | None,
    filters: Mapping[str, str],
    after: str | None,
    limit: int,
) -> InvoicePage:
    """List invoices behind the invoice with the id `after`, of one tenant, or of all as an operator for None.

    `filters`: `state` and `month`, and the value each must have. Raises `InvoiceNotFound` for an id that names none.
    """
    repository = InvoiceRepository(session, tenant_id)
    behind = None if after is None else await _found(repository, after)
    place = None if behind is None else (behind.created_at, behind.id)
    found = await repository.page(filters, place, limit + 1)
    totals = await repository.draft_totals(found[:limit])
    rows = tuple(_row(each, totals) for each in found[:limit])
    return InvoicePage(rows=rows, older=rows[-1].id if len(found) > limit else None)


def _row(each: Invoice, totals: Mapping[UUID, int]) -> InvoiceRow:
    total = totals[each.id] if each.total_micro is None else each.total_micro
    return InvoiceRow(
        id=each.id,
        tenant_id=each.tenant_id,
        number=each.number,
        month=each.month,
        currency=each.currency,
        state=each.state,
        total_micro=total,
        created_at=each.created_at,
        finalized_at=each.finalized_at,
        paid_at=each.paid_at,
    )


async def invoice(session: AsyncSession, tenant_id: UUID | None, identity: str) -> InvoiceDetails:
    """Read one invoice, of any tenant as an operator for None; a draft as it would be now. Raises `InvoiceNotFound`."""
    repository = InvoiceRepository(session, tenant_id)
    return await repository.details(await _found(repository, identity))


async def _found(repository: InvoiceRepository, identity: str) -> Invoice:
    return await repository.by_id(invoice_id_of(identity))


async def preview(session: AsyncSession, tenant_id: UUID, month: str, currency: str | None) -> InvoiceDetails:
    """Return what finalizing a month would lead to, as an operator; nothing is written. Raises `InvalidField`."""
    return await InvoiceRepository(session).preview(tenant_id, month_of(month), currency)


async def customers(
    session: AsyncSession, found: Iterable[InvoiceRow | InvoiceDetails]
) -> Mapping[UUID, str]:
    """Name the tenants of invoices, as an operator."""
    return await names_of(session, {each.tenant_id for each in found})


def month_of(text: str) -> Month:
    """Read `YYYY-MM`. Raises `InvalidField`."""
    return Month.parse(text)


def invoice_id_of(text: str) -> UUID:
    """Read the id of a path. Raises `InvoiceNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise InvoiceNotFound(f"no invoice {text[:80]!r}")
    return parsed


def document(details: InvoiceDetails) -> dict[str, Any]:
    """Return an invoice as the API writes it: what `invoice_formats` turns into CSV and HTML."""
    return invoice_document(details)


async def credits(session: AsyncSession, tenant_id: UUID, now: datetime) -> tuple[CreditRow, ...]:
    """Read the newest grants: those that can still pay in the order in which invoices use them, then the others."""
    repository, month = CreditRepository(session, tenant_id), Month.of(now)
    granted = await repository.page(None, MAX_CREDITS)
    places: dict[UUID, int] = {}
    for currency in {each.grant.currency for each in granted}:
        usable = [each for each in await repository.balances(currency) if is_usable(each, month)]
        ordered = sorted(usable, key=lambda each: each.burn_order)
        places |= {each.grant_id: place for place, each in enumerate(ordered, start=1)}
    rows = [_credit(each, places.get(each.grant.id)) for each in granted]
    return tuple(sorted(rows, key=lambda row: (row.place is None, row.currency, row.place or 0)))


async def grants(session: AsyncSession, after: str | None, limit: int) -> GrantPage:
    """Read grants of all tenants behind the grant `after`, as an operator. Raises `InvalidField` for what is no id."""
    behind = None if after is None else canonical_uuid(after)
    if after is not None and behind is None:
        raise InvalidField("after", "after must be the id of a credit")
    found = await newest_grants(session, behind, limit + 1)
    names = await names_of(session, {each.grant.tenant_id for each in found})
    rows = tuple(GrantRow(names[each.grant.tenant_id], _credit(each, None)) for each in found[:limit])
    return GrantPage(rows=rows, older=rows[-1].credit.id if len(found) > limit else None)


def _credit(granted: GrantedCredit, place: int | None) -> CreditRow:
    grant = granted.grant
    return CreditRow(
        id=grant.id,
        tenant_id=grant.tenant_id,
        currency=grant.currency,
        granted_micro=grant.amount_micro,
        left_micro=granted.available_micro,
        priority=grant.priority,
        reason=grant.reason,
        granted_at=grant.granted_at,
        expires_at=grant.expires_at,
        place=place,
    )


async def alerts(session: AsyncSession, tenant_id: UUID) -> Sequence[AlertRow]:
    """Read the newest budgets that crossed 80 or 100 percent, the last first."""
    events = await quota_events(session, tenant_id, None, MAX_ALERTS * 2)
    return [_alert(each) for each in events if each[0].limit_name in BUDGETS][:MAX_ALERTS]


def _alert(found: Event) -> AlertRow:
    event, key_id, adapter = found
    return AlertRow(
        at=event.created_at,
        level=event.level,
        subject=key_id or adapter,
        period=event.period[2:],
        threshold=event.threshold,
        used_micro=event.used,
        budget_micro=event.limit_value,
    )
