"""Use cases on rate cards, for operators: a new version of a card, and the first card of an installation.

Invariant: a version that was in force never changes. A creation writes one audit entry, which names the tenant of its card.
"""

from datetime import datetime
from typing import Any

from loraplex.platform.services.unit_of_work import UnitOfWork
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import CardVersion, RateCards

ACTION = "rate-card.create"


async def create(
    uow: UnitOfWork, key: CardKey, price: Price, effective_from: datetime | None = None
) -> CardVersion:
    """Add a version to the card of `key`. It ends its predecessor when it begins: at `effective_from`, or now for None, but no
    sooner than every gateway knows it, in 2 seconds.

    Raises `TenantNotFound`, `InvalidField`, and `InUse` for a moment in the past or at which a version of the card begins already.
    """
    if key.tenant_id is not None:
        await TenantRepository(uow.session).living(key.tenant_id)
    made = await RateCards(uow.session).create(key, price, effective_from)
    await _record(uow, made)
    return made


async def create_first(uow: UnitOfWork, currency: str, price: Price) -> CardVersion | None:
    """Create the card for all requests of an installation that has none, in force at all times; None if it has one."""
    made = await RateCards(uow.session).create_first(currency, price)
    if made is not None:
        await _record(uow, made)
    return made


async def _record(uow: UnitOfWork, made: CardVersion) -> None:
    await uow.audit.record(
        ACTION, f"rate-cards/{made.id}", None, snapshot(made), tenant_id=made.key.tenant_id
    )


def snapshot(version: CardVersion) -> dict[str, Any]:
    """Return a version's fields for the audit log."""
    return {
        "id": version.id,
        "scope": version.scope,
        "tier": version.key.tier,
        "tenant_id": version.key.tenant_id,
        "adapter": version.key.adapter_name,
        "currency": version.key.currency,
        "version": version.version,
        "prompt": version.price.prompt,
        "cached_prompt": version.price.cached_prompt,
        "completion": version.price.completion,
        "effective_from": version.effective_from,
        "effective_to": version.effective_to,
    }
