"""Reads what tenants have used and what of it is billed, from the monthly rollups and the lines of invoices.

Invariant: both sides have the same keys, so that their difference is what is still to be billed. Lines of void invoices do not
count, nor do drafts. Each read is one statement, for however many tenants.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices.lines import Charge, LineKey, UsageSum
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import Adapter, Invoice, InvoiceLineRow, MonthlyRollup, PriceVersion
from loraplex.tenants.models.usage import NO_ID

BILLED_STATES: Final = ("final", "paid")
Account: TypeAlias = tuple[UUID, str]
"""A tenant and a currency: a month has an invoice for each."""


class BillableUsage:
    """The usage of tenants in a month and all before, in one session of an operator, or of the role of the one tenant."""

    def __init__(self, session: AsyncSession, tenant_ids: Iterable[UUID], month: Month) -> None:
        self._session = session
        self._tenant_ids = frozenset(tenant_ids)
        self._month = month

    async def sums(self) -> dict[Account, list[UsageSum]]:
        """Return what was used, by account.

        Of usage from before rate cards only that of months from the tenant's first invoice on: the rest was billed elsewhere.
        """
        rollup = MonthlyRollup
        query = select(
            *(rollup.tenant_id, rollup.currency, rollup.month, rollup.adapter_id, rollup.price_version_id),
            *(
                rollup.uncached_tokens,
                rollup.cached_tokens,
                rollup.completion_tokens,
                rollup.reasoning_tokens,
            ),
            rollup.amount_pico,
        ).where(rollup.tenant_id.in_(self._tenant_ids), rollup.month < self._month.end)
        invoiced = await self._first_invoiced()
        sums: dict[Account, list[UsageSum]] = {}
        for row in (await self._session.execute(query)).all():
            used = _usage_sum(row)
            first = min(self._month, invoiced.get(row.tenant_id, self._month))
            if used.price_version_id is not None or used.month >= first:
                sums.setdefault((row.tenant_id, row.currency), []).append(used)
        return sums

    async def billed(self) -> dict[Account, dict[LineKey, Charge]]:
        """Return what final and paid invoices billed, by account."""
        line = InvoiceLineRow
        group = (
            *(line.tenant_id, Invoice.currency),
            *(line.month, line.adapter_id, line.price_version_id, line.token_class),
        )
        query = (
            select(*group, func.sum(line.tokens), func.sum(line.amount_pico))
            .join(Invoice, Invoice.id == line.invoice_id)
            .where(line.tenant_id.in_(self._tenant_ids), Invoice.tenant_id == line.tenant_id)
            .where(line.month <= str(self._month), line.token_class.is_not(None))
            .where(Invoice.state.in_(BILLED_STATES))
            .group_by(*group)
        )
        billed: dict[Account, dict[LineKey, Charge]] = {}
        rows = (await self._session.execute(query)).all()
        for tenant_id, currency, month, adapter_id, version, token_class, tokens, pico in rows:
            key = LineKey(Month.parse(month), adapter_id, version, token_class or "")
            billed.setdefault((tenant_id, currency), {})[key] = Charge(int(tokens), int(pico))
        return billed

    async def adapter_names(self, ids: Iterable[UUID]) -> dict[UUID, str]:
        """Return the names of the tenants' adapters, deleted ones too; one that was erased has none."""
        query = select(Adapter.id, Adapter.name)
        query = query.where(Adapter.tenant_id.in_(self._tenant_ids), Adapter.id.in_(set(ids)))
        return {row.id: row.name for row in await self._session.execute(query)}

    async def _first_invoiced(self) -> dict[UUID, Month]:
        query = select(Invoice.tenant_id, func.min(Invoice.month))
        query = query.where(Invoice.tenant_id.in_(self._tenant_ids)).group_by(Invoice.tenant_id)
        return {tenant_id: Month.parse(month) for tenant_id, month in await self._session.execute(query)}


async def prices_of(session: AsyncSession, ids: Iterable[UUID]) -> Mapping[UUID, Price]:
    """Return the prices of versions by their ids."""
    query = select(PriceVersion).where(PriceVersion.id.in_(set(ids)))
    return {each.id: Price.of(each) for each in await session.scalars(query)}


def _usage_sum(row: Row[*tuple[Any, ...]]) -> UsageSum:
    return UsageSum.of(
        Month.of(row.month),
        None if row.adapter_id == NO_ID else row.adapter_id,
        None if row.price_version_id == NO_ID else row.price_version_id,
        *(
            row.uncached_tokens,
            row.cached_tokens,
            row.completion_tokens,
            row.reasoning_tokens,
            row.amount_pico,
        ),
    )
