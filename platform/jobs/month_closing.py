"""Closes months: drafts the invoices of last month when it has ended, and makes them final after their grace.

Invariant: each step is one transaction of one tenant and may be repeated, by any number of gateways at once. A tenant whose step
fails does not stop the others; it is tried again. No gateway's own clock ends a month.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.invoices import use_cases
from loraplex.tenants.invoices.content import InvoiceContent, compute_contents
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.locks import try_lock_tenant
from loraplex.tenants.invoices.months import Month, passed_everywhere
from loraplex.tenants.models import Invoice
from loraplex.tenants.repetition import attempt, repeat
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

PASS_S: Final = 60.0
RECHECK: Final = timedelta(hours=6)
"""How long a tenant without anything to bill, or with its drafts, is not looked at again: for usage that arrives late."""

JUST_ENDED: Final = timedelta(days=1)
"""How long after its end a month without usage is billed a minimum: one that is agreed later does not reach back."""
LOG = structlog.get_logger("loraplex.month_closing")


@dataclass(slots=True, kw_only=True)
class MonthClosing:
    """The job of one gateway. `grace`: from the end of a month until its invoices become final, for usage that arrives late."""

    database: Database
    grace: timedelta
    clock: Callable[[AsyncSession], Awaitable[datetime]] = passed_everywhere
    _checked: dict[UUID, datetime] = field(default_factory=dict)
    _month: Month | None = None

    async def run(self) -> None:
        """Repeat `close` until cancelled."""
        await repeat(LOG, self.close, PASS_S)

    async def close(self) -> None:
        """Do what is due now. Errors are logged, and what failed is tried again by the next pass."""
        try:
            async with self.database.as_operator() as session:
                now = await self.clock(session)
                tenants = await self._unchecked(session, now)
                drafts = await InvoiceRepository(session).due(now)
        except TenantsError as error:
            LOG.warning("tried again later", error=str(error)[:200])
            return
        for tenant_id in tenants:
            if await _attempt("draft", tenant_id, self._draft(tenant_id, now)):
                self._checked[tenant_id] = now
        for invoice in drafts:
            await _attempt("finalize", invoice.tenant_id, self._finalize(invoice, now))

    async def _unchecked(self, session: AsyncSession, now: datetime) -> Sequence[UUID]:
        """Return the tenants that last month was not checked for recently."""
        month = Month.of(now).previous
        if month != self._month:
            self._month, self._checked = month, {}
        self._checked = {each: at for each, at in self._checked.items() if now - at < RECHECK}
        customers = await InvoiceRepository(session).customers(month)
        return [each for each in customers if each not in self._checked]

    async def _draft(self, tenant_id: UUID, now: datetime) -> bool:
        """Draft the invoices of last month; return False if another transaction works on the tenant."""
        month = Month.of(now).previous
        grace_ends_at = month.end + self.grace
        if now >= grace_ends_at:
            grace_ends_at = now + self.grace
        async with self._unit_of_work() as uow:
            if not await try_lock_tenant(uow.session, tenant_id):
                return False
            contents = await compute_contents(uow.session, tenant_id, month)
            for currency, content in contents.items():
                if _is_due(content, just_ended=now < month.end + JUST_ENDED):
                    await use_cases.draft(uow, tenant_id, month, currency, grace_ends_at)
        return True

    async def _finalize(self, invoice: Invoice, now: datetime) -> bool:
        async with self._unit_of_work() as uow:
            if not await try_lock_tenant(uow.session, invoice.tenant_id):
                return False
            await use_cases.finalize(
                uow,
                invoice.tenant_id,
                Month.parse(invoice.month),
                now=now,
                currency=invoice.currency,
            )
        return True

    def _unit_of_work(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """Open a transaction with an operator's rights. An invoice changes nothing that gateways cache."""
        return unit_of_work(self.database, system_actor("month closing"), None, None)


async def _attempt(step: str, tenant_id: UUID, work: Awaitable[bool]) -> bool:
    """Whether the step was done. A defect in one tenant's bill does not stop the others."""
    return bool(await attempt(LOG, work, "invoice failed", step=step, tenant_id=str(tenant_id)))


def _is_due(content: InvoiceContent, *, just_ended: bool) -> bool:
    """Whether a month is closed by itself: usage under a rate card, or a minimum that was agreed before the month ended.

    Usage from before rate cards may have been billed elsewhere.
    """
    lines = content.totals.lines
    if any(line.price_version_id is not None or line.kind == "adjustment" for line in lines):
        return True
    return just_ended and any(line.kind == "minimum" for line in lines)
