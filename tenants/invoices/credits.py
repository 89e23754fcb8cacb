"""Credits of tenants: grants that never change, and entries that move their amounts between accounts.

Invariant: every transaction sums to zero, and no grant falls below zero. Changes take the tenant's billing lock.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ScalarSelect, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.ids import uuid7
from loraplex.tenants.invoices.locks import lock_tenant
from loraplex.tenants.invoices.records import (
    DEFAULT_PRIORITY,
    MAX_CREDIT_MICRO,
    MAX_PRIORITY,
    MAX_REASON,
    CreditDocument,
)
from loraplex.tenants.invoices.totals import CreditBalance, CreditUse
from loraplex.tenants.models import CreditEntry, CreditGrant
from loraplex.tenants.models.billing import CURRENCY

LAST_EXPIRY: Final = datetime(3000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCredit:
    """A credit to grant, in micro-units. `expires_at` None: never; else it pays for months that end before.

    Raises `InvalidField`.
    """

    currency: str
    amount_micro: int
    reason: str
    priority: int = DEFAULT_PRIORITY
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.amount_micro <= MAX_CREDIT_MICRO:
            raise InvalidField("amount_micro", f"amount_micro must be between 1 and {MAX_CREDIT_MICRO}")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidField("priority", f"priority must be between 0 and {MAX_PRIORITY}")
        if not 1 <= len(self.reason) <= MAX_REASON:
            raise InvalidField("reason", f"reason must have 1 to {MAX_REASON} characters")
        if not re.fullmatch(CURRENCY, self.currency):
            raise InvalidField("currency", "currency must be three capital letters")
        if self.expires_at is not None and self.expires_at > LAST_EXPIRY:
            raise InvalidField("expires_at", f"expires_at must lie before the year {LAST_EXPIRY.year}")


class CreditRepository:
    """The credits of one tenant. Only an operator's session may change them."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def grant(self, credit: NewCredit) -> CreditDocument:
        """Grant a credit. Raises `InvalidField` for an expiry in the past."""
        await lock_tenant(self._session, self._tenant_id)
        now = await self._session.scalar(select(func.now()))
        if credit.expires_at is not None and now is not None and credit.expires_at <= now:
            raise InvalidField("expires_at", "expires_at must lie in the future")
        grant = CreditGrant(
            id=uuid7(),
            tenant_id=self._tenant_id,
            currency=credit.currency,
            amount_micro=credit.amount_micro,
            priority=credit.priority,
            expires_at=credit.expires_at,
            reason=credit.reason,
        )
        self._session.add(grant)
        await self._session.flush()
        await self._move(None, "issued", "available", [CreditUse(grant.id, credit.amount_micro)])
        return credit_document(grant, credit.amount_micro)

    async def balances(self, currency: str) -> list[CreditBalance]:
        """Return what is left of the grants in a currency, without those that are used up."""
        found = await balances_of_all(self._session, (self._tenant_id,))
        return found.get((self._tenant_id, currency), [])

    async def use(self, invoice_id: UUID, uses: Iterable[CreditUse]) -> None:
        """Use credits for an invoice, under the tenant's lock."""
        await self._move(invoice_id, "available", "consumed", uses)

    async def give_back(self, invoice_id: UUID) -> None:
        """Give back what an invoice has used, under the tenant's lock."""
        await self._move(invoice_id, "consumed", "available", await self.used_by(invoice_id))

    async def used_by(self, invoice_id: UUID) -> list[CreditUse]:
        """Return what a final invoice used, in the order of use; a void one too, before it gave that back."""
        query = (
            select(CreditEntry.grant_id, CreditEntry.amount_micro)
            .where(CreditEntry.tenant_id == self._tenant_id, CreditEntry.invoice_id == invoice_id)
            .where(CreditEntry.account == "consumed", CreditEntry.amount_micro > 0)
            .order_by(CreditEntry.id)
        )
        return [CreditUse(row.grant_id, row.amount_micro) for row in await self._session.execute(query)]

    async def _move(
        self, invoice_id: UUID | None, source: str, target: str, uses: Iterable[CreditUse]
    ) -> None:
        """Write one transaction for each grant: its amount leaves `source` and enters `target`."""
        for use in uses:
            transaction = uuid7()
            for account, amount in ((source, -use.amount_micro), (target, use.amount_micro)):
                entry = CreditEntry(
                    tenant_id=self._tenant_id,
                    transaction_id=transaction,
                    grant_id=use.grant_id,
                    invoice_id=invoice_id,
                    account=account,
                    amount_micro=amount,
                )
                self._session.add(entry)
            await self._session.flush()


async def balances_of_all(
    session: AsyncSession, tenant_ids: Collection[UUID]
) -> dict[tuple[UUID, str], list[CreditBalance]]:
    """Return what is left of grants by tenant and currency, without those that are used up."""
    query = select(CreditGrant, available()).where(CreditGrant.tenant_id.in_(tenant_ids))
    rows = await session.execute(query.where(available() > 0).order_by(CreditGrant.id))
    balances: dict[tuple[UUID, str], list[CreditBalance]] = {}
    for grant, left in rows:
        balance = CreditBalance(
            grant_id=grant.id,
            priority=grant.priority,
            expires_at=grant.expires_at,
            granted_at=grant.granted_at,
            available_micro=int(left),
        )
        balances.setdefault((grant.tenant_id, grant.currency), []).append(balance)
    return balances


def credit_document(grant: CreditGrant, available_micro: int) -> CreditDocument:
    """Return a grant with what is left of it."""
    names = CreditDocument.model_fields.keys() - {"available_micro"}
    fields = {name: getattr(grant, name) for name in names}
    return CreditDocument(**fields, available_micro=available_micro)


def available() -> ScalarSelect[Any]:
    """The sum of the entries of a grant in the account `available`."""
    total = func.coalesce(func.sum(CreditEntry.amount_micro), 0)
    query = select(total).where(
        CreditEntry.tenant_id == CreditGrant.tenant_id,
        CreditEntry.grant_id == CreditGrant.id,
        CreditEntry.account == "available",
    )
    return query.correlate(CreditGrant).scalar_subquery()
