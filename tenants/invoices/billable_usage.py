"""Reads what a tenant has used and what of it is billed, from the hourly rollups and the lines of invoices.

Invariant: both sides have the same keys, so that their difference is what is still to be billed. Lines of void invoices do not
count, nor do drafts.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices.lines import Charge, LineKey, UsageSum
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import Adapter, Invoice, InvoiceLineRow, PriceVersion, UsageRollup
from loraplex.tenants.models.usage import NO_ID

BILLED_STATES: Final = ("final", "paid")


class BillableUsage:
    """The usage of one tenant, in one session of its role or an operator's."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def sums(self, month: Month) -> dict[str, list[UsageSum]]:
        """Return by currency the sums of the month and of all before.

        Of usage from before rate cards only that of months from the tenant's first invoice on: the rest was billed elsewhere.
        """
        rollup = UsageRollup
        of_month = func.date_trunc("month", rollup.hour, "UTC")
        group = (rollup.currency, of_month, rollup.adapter_id, rollup.price_version_id)
        amounts = (rollup.uncached_tokens, rollup.cached_tokens, rollup.completion_tokens, rollup.amount_pico)
        first = min(month, await self._first_invoiced() or month)
        query = (
            select(*group, *(func.sum(column) for column in amounts))
            .where(rollup.tenant_id == self._tenant_id, rollup.hour < month.end)
            .where(or_(rollup.price_version_id != NO_ID, rollup.hour >= first.begin))
            .group_by(*group)
        )
        sums: dict[str, list[UsageSum]] = {}
        for currency, *row in (await self._session.execute(query)).all():
            sums.setdefault(currency, []).append(_usage_sum(*row))
        return sums

    async def billed(self, month: Month) -> dict[str, dict[LineKey, Charge]]:
        """Return by currency what final and paid invoices billed of the month and of all before."""
        line = InvoiceLineRow
        group = (Invoice.currency, line.month, line.adapter_id, line.price_version_id, line.token_class)
        query = (
            select(*group, func.sum(line.tokens), func.sum(line.amount_pico))
            .join(Invoice, Invoice.id == line.invoice_id)
            .where(line.tenant_id == self._tenant_id, line.month <= str(month), line.token_class.is_not(None))
            .where(Invoice.tenant_id == self._tenant_id, Invoice.state.in_(BILLED_STATES))
            .group_by(*group)
        )
        billed: dict[str, dict[LineKey, Charge]] = {}
        rows = (await self._session.execute(query)).all()
        for currency, of_month, adapter_id, version, token_class, tokens, pico in rows:
            key = LineKey(Month.parse(of_month), adapter_id, version, token_class or "")
            billed.setdefault(currency, {})[key] = Charge(int(tokens), int(pico))
        return billed

    async def adapter_names(self, ids: Iterable[UUID]) -> dict[UUID, str]:
        """Return the names of the tenant's adapters, deleted ones too; one that was erased has none."""
        query = select(Adapter.id, Adapter.name)
        query = query.where(Adapter.tenant_id == self._tenant_id, Adapter.id.in_(set(ids)))
        return {row.id: row.name for row in await self._session.execute(query)}

    async def _first_invoiced(self) -> Month | None:
        query = select(func.min(Invoice.month)).where(Invoice.tenant_id == self._tenant_id)
        first = await self._session.scalar(query)
        return None if first is None else Month.parse(first)


async def prices_of(session: AsyncSession, ids: Iterable[UUID]) -> Mapping[UUID, Price]:
    """Return the prices of versions by their ids."""
    query = select(PriceVersion).where(PriceVersion.id.in_(set(ids)))
    return {
        each.id: Price(prompt=each.prompt, cached_prompt=each.cached_prompt, completion=each.completion)
        for each in await session.scalars(query)
    }


def _usage_sum(month: datetime, adapter_id: UUID, price_version_id: UUID, *amounts: Any) -> UsageSum:
    adapter = None if adapter_id == NO_ID else adapter_id
    version = None if price_version_id == NO_ID else price_version_id
    return UsageSum.of(Month.of(month), adapter, version, *amounts)
