"""Use cases on prices, for operators: a new version of a rate card, the first card of an installation, a month's usage under a
draft, and the billing data of a tenant.

Invariant: a version that was in force never changes. A change writes one audit entry, which names its tenant; one that changes
nothing writes none.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select, union
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.preview import rate, totals
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import (
    RateCardDocument,
    RatedTotalDocument,
    RatedUsageDocument,
)
from loraplex.tenants.billing.rate_cards import RateCards, scope_of
from loraplex.tenants.billing.records import TenantBillingDocument
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import RateCard, SignUpPlan, Tenant
from loraplex.tenants.periods import period_start, periods_of
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

ACTION: Final = "rate-card.create"
BILLING_ACTION: Final = "billing.change"
MAX_TIERS: Final = 20
"""Tiers that a refusal names."""
MONTH: Final = "20[0-9]{2}-(0[1-9]|1[0-2])"


async def create(
    uow: UnitOfWork, key: CardKey, price: Price, effective_from: datetime | None = None
) -> RateCardDocument:
    """Add a version to the card of `key`. It ends its predecessor when it begins: at `effective_from`, or now for None, but no
    sooner than every gateway knows it, in 2 seconds.

    Raises `TenantNotFound`, `InvalidField`, and `InUse` for a moment in the past or at which a version of the card begins already.
    """
    if key.tenant_id is not None:
        await TenantRepository(uow.session).living(key.tenant_id)
    made = await RateCards(uow.session).create(key, price, effective_from)
    await _record(uow, made)
    return made


async def create_first(uow: UnitOfWork, currency: str, price: Price) -> RateCardDocument | None:
    """Create the card for all requests of an installation that has none, in force at all times; None if it has one."""
    made = await RateCards(uow.session).create_first(currency, price)
    if made is not None:
        await _record(uow, made)
    return made


@dataclass(frozen=True, slots=True)
class Preview:
    """A month's usage as billed and under a draft: of every tenant that has any, in the order of their ids."""

    month: str
    rated: Sequence[RatedUsageDocument]

    @property
    def totals(self) -> Sequence[RatedTotalDocument]:
        """The sums by currency."""
        return totals(self.rated)


async def preview_draft(
    session: AsyncSession, key: CardKey, price: Price, month: str | None = None
) -> Preview:
    """Preview a draft, as an operator. Raises as `preview`, and for a tier that neither a tenant nor a card nor the plan of sign-up has."""
    if key.tier is not None and key.tier not in (known := await tiers(session)):
        names = ", ".join(known[:MAX_TIERS])
        raise InvalidField("tier", f"there is no tier {key.tier[:80]}; the tiers are {names or 'none yet'}")
    return await preview(session, key, price, month)


async def preview(session: AsyncSession, key: CardKey, price: Price, month: str | None = None) -> Preview:
    """Rate the usage of a month, `YYYY-MM` in UTC, under a card, without writing anything. None: last month. Raises `InvalidField`."""
    if month is None:
        this_month = period_start(periods_of(datetime.now(UTC)).month)
        month = periods_of(this_month - timedelta(days=1)).month.removeprefix("m:")
    if not re.fullmatch(MONTH, month):
        raise InvalidField("month", "month must be a year and a month, such as 2026-10")
    return Preview(month, await rate(session, key, price, period_start(f"m:{month}")))


async def tiers(session: AsyncSession) -> Sequence[str]:
    """Return the tiers of living tenants, of rate cards and of the plan of sign-up, by name, as an operator."""
    of_tenants = select(Tenant.tier).where(Tenant.deleted_at.is_(None))
    of_cards = select(RateCard.tier).where(RateCard.tier.is_not(None))
    of_plan = select(SignUpPlan.tier).where(SignUpPlan.ended_at.is_(None))
    return sorted(await session.scalars(union(of_tenants, of_cards, of_plan)))


async def _record(uow: UnitOfWork, made: RateCardDocument) -> None:
    await uow.audit.record(
        ACTION, f"rate-cards/{made.id}", None, snapshot(made), tenant_id=made.key.tenant_id
    )


def snapshot(version: RateCardDocument) -> dict[str, Any]:
    """Return a version's fields for the audit log."""
    key = version.key
    return {
        "id": version.id,
        "scope": scope_of(key),
        "tier": key.tier,
        "tenant_id": key.tenant_id,
        "adapter": key.adapter_name,
        "currency": key.currency,
        "version": version.version,
        **dict(version.prices),
        "effective_from": version.effective_from,
        "effective_to": version.effective_to,
    }


async def change_billing(
    uow: UnitOfWork, tenant_id: UUID, fields: Mapping[str, Any], *, seen: int | None = None
) -> TenantBillingDocument:
    """Set the billing data of a tenant that `fields` names. Another currency begins with the next month, or at once for a
    tenant that was never used. `seen`: the revision that the author has read, None for any.

    Raises `TenantNotFound`, `RevisionMoved`, and `InUse` for another currency in the month in which the last one began.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    billings = TenantBillings(uow.session)
    row = await billings.locked(tenant.id)
    require_revision(seen, row.revision)
    before = (await billings.read(row)).model_dump()
    changed = await billings.change(row, fields)
    after = changed.model_dump()
    if before != after:
        target = f"tenants/{tenant.id}/billing"
        await uow.audit.record(BILLING_ACTION, target, before, after, tenant_id=tenant.id)
    return changed
