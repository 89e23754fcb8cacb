"""What the page of billing joins: the prices of a tenant, and its budgets that were crossed."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.rate_card_records import RateCardDocument, RatedUsageDocument
from loraplex.tenants.billing.rate_cards import RateCards, scope_of
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.quotas.limits import BUDGETS
from loraplex.tenants.quotas.queries import events
from loraplex.tenants.quotas.records import EventDocument

SPECIFICITY: Final = ("all", "tier", "tenant")
"""Scopes of cards that cover the base model, the most specific last."""
MAX_ALERTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """A price that begins later, and what it changes: last month's usage as billed and under it. `None`: no usage then."""

    version: RateCardDocument
    last_month: RatedUsageDocument | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a tenant. `general`: what applies where no adapter has a card of its own; None: nothing has a price.

    `next_currency` replaces `currency` on `next_currency_from`, 00:00 UTC.
    """

    currency: str
    next_currency: str | None
    next_currency_from: date | None
    general: RateCardDocument | None
    of_adapters: tuple[RateCardDocument, ...]
    coming: tuple[Coming, ...]


async def prices(session: AsyncSession, tenant_id: UUID, now: datetime) -> Prices:
    """Read the prices that apply now and those that begin later, in the tenant's currency and the next one.

    Raises `TenantNotFound`.
    """
    tenant = await TenantRepository(session).by_id(tenant_id)
    data = await TenantBillings(session).get(tenant_id)
    currencies = [each for each in (data.currency, data.next_currency) if each is not None]
    standing = await RateCards(session).standing(tenant_id, tenant.tier, currencies, now)
    begun = [each for each in standing if each.effective_from <= now and each.currency == data.currency]
    general = [each for each in begun if scope_of(each.key) in SPECIFICITY]
    return Prices(
        currency=data.currency,
        next_currency=data.next_currency,
        next_currency_from=data.next_currency_from,
        general=max(general, key=lambda each: SPECIFICITY.index(scope_of(each.key)), default=None),
        of_adapters=tuple(each for each in begun if scope_of(each.key) == "adapter"),
        coming=tuple(
            [await _coming(session, each, tenant_id) for each in standing if each.effective_from > now]
        ),
    )


async def _coming(session: AsyncSession, version: RateCardDocument, tenant_id: UUID) -> Coming:
    preview = await rate_cards.preview(session, version.key, version.price)
    wanted = tenant_id, version.currency
    of_tenant = (each for each in preview.rated if (each.tenant_id, each.currency) == wanted)
    return Coming(version=version, last_month=next(of_tenant, None))


async def alerts(session: AsyncSession, tenant_id: UUID) -> Sequence[EventDocument]:
    """Read the newest budgets that crossed 80 or 100 percent, the last first."""
    found = await events(session, tenant_id, None, MAX_ALERTS * 2)
    return [each for each in found if each.limit_name in BUDGETS][:MAX_ALERTS]
