"""The billing data of tenants: what their bills show, and the currency they are charged in.

Invariant: a tenant's currency changes at 00:00 UTC of the first day of a month, so that each month's budget and bill has one.
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.price_table import TenantCurrency
from loraplex.tenants.billing.pricing import NO_PRICE
from loraplex.tenants.billing.rate_cards import NOTICE, RateCards
from loraplex.tenants.billing.records import FIRST_REVISION, TenantBillingDocument
from loraplex.tenants.errors import InUse
from loraplex.tenants.models import ApiKey, ReservationRow, TenantBilling, UsageTotal

TERMS: Final = ("issuer", "customer_name", "customer_address", "vat_id", "tax_rate_ppm", "minimum_micro")
"""What bills state: a change sets these as they are. `currency` follows a rule of its own."""


class TenantBillings:
    """The billing data of tenants, seen by one session. The caller ensures that the tenant exists."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, tenant_id: UUID) -> TenantBillingDocument:
        """The data as they are now."""
        row = await self._session.get(TenantBilling, tenant_id)
        return _document(row, await self.default_currency(), await self._now())

    async def locked(self, tenant_id: UUID) -> TenantBilling:
        """The row, created if missing, and locked until the transaction ends."""
        await self._session.execute(
            insert(TenantBilling).values(tenant_id=tenant_id).on_conflict_do_nothing()
        )
        query = select(TenantBilling).where(TenantBilling.tenant_id == tenant_id).with_for_update()
        return (await self._session.scalars(query.execution_options(populate_existing=True))).one()

    async def read(self, row: TenantBilling) -> TenantBillingDocument:
        """The data of a locked row."""
        return _document(row, await self.default_currency(), await self._now())

    async def change(self, row: TenantBilling, change: Mapping[str, Any]) -> TenantBillingDocument:
        """Set the fields that `change` names. Another currency begins with the next month; at once for a tenant that was never
        used. The present currency ends a change that has not begun. Raises `InUse` for another one in the month in which the last
        one began: the bill of the month before needs both of that one.
        """
        now, default = await self._now(), await self.default_currency()
        fields = {name: value for name, value in change.items() if name in TERMS}
        if "currency" in change:
            present = currency_of(row, default).at(now)
            fields |= await self._new_currency(row, present, change["currency"], now)
        for name, value in {**fields, "updated_at": now}.items():
            setattr(row, name, value)
        await self._session.flush()
        return _document(row, default, now)

    async def default_currency(self) -> str:
        """The currency of tenants without one of their own: that of the installation's first card."""
        first = await RateCards(self._session).oldest_for_all()
        return NO_PRICE.currency if first is None else first.key.currency

    async def _new_currency(
        self, row: TenantBilling, present: str, wanted: str, now: datetime
    ) -> dict[str, str | date | None]:
        begins, begun = next_month(now + NOTICE), row.next_currency_from
        if begun is not None and begun <= now.date():
            if wanted == present:
                return {}
            if next_month(now) == next_month(datetime.combine(begun, time(), UTC)):
                raise InUse(
                    f"the currency changed on {begun}; it can be changed again from {next_month(now)} on"
                )
        if wanted == present or not await self._was_used(row.tenant_id):
            return {"currency": wanted, "next_currency": None, "next_currency_from": None}
        return {"currency": present, "next_currency": wanted, "next_currency_from": begins}

    async def _was_used(self, tenant_id: UUID) -> bool:
        """Whether a request of the tenant may have been admitted: one is in the ledger, or a key was used."""
        traces = (
            select(UsageTotal.tenant_id).where(UsageTotal.tenant_id == tenant_id),
            select(ReservationRow.id).where(ReservationRow.tenant_id == tenant_id),
            select(ApiKey.id).where(ApiKey.tenant_id == tenant_id, ApiKey.last_used_at.is_not(None)),
        )
        return bool(await self._session.scalar(select(or_(*(each.exists() for each in traces)))))

    async def _now(self) -> datetime:
        now: datetime = (await self._session.execute(select(func.clock_timestamp()))).scalar_one()
        return now


def currency_of(row: TenantBilling, default: str) -> TenantCurrency:
    """The currency of a row, and its change."""
    begins = row.next_currency_from
    changes_at = None if begins is None else datetime.combine(begins, time(), UTC)
    return TenantCurrency(row.currency or default, row.next_currency, changes_at)


def _document(row: TenantBilling | None, default_currency: str, now: datetime) -> TenantBillingDocument:
    """The data of a row as they are now; a tenant without a row has the defaults."""
    row = row or TenantBilling(tax_rate_ppm=0, minimum_micro=0, revision=FIRST_REVISION)
    currency = currency_of(row, default_currency)
    pending = currency.at(now) != currency.next_currency
    return TenantBillingDocument(
        currency=currency.at(now),
        next_currency=row.next_currency if pending else None,
        next_currency_from=row.next_currency_from if pending else None,
        revision=row.revision,
        **{name: getattr(row, name) for name in TERMS},
    )


def next_month(now: datetime) -> date:
    """The first day of the month after that of `now`, in UTC."""
    first = now.astimezone(UTC).date().replace(day=1)
    return (first + timedelta(days=31)).replace(day=1)
