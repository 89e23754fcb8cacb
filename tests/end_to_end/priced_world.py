"""Two tenants in two currencies, their adapters, and all price versions that their requests are charged by.

Invariant: no two prices are equal, so that an amount can only have come from its own.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from uuid import UUID

import httpx
from sqlalchemy.ext.asyncio import AsyncSession
from tests.end_to_end.gateway_farm import MODEL
from tests.end_to_end.priced_load import Caller
from tests.tenants.registry_records import AliasWriter, RegistryWriter

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import RateCardDocument
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota

LIMITS: Final = {"tokens_per_day": 10**9, "tokens_per_month": 10**10, "budget_per_month": 10**12}
CURRENCIES: Final = {"acme": "USD", "other": "EUR"}
ADAPTERS: Final = ("poet", "clerk")
CLASSES: Final = ("uncached_prompt", "cached_prompt", "completion")
FIRST: Final = Price(prompt=1_500_001, cached_prompt=150_007, completion=6_000_011)
EUROS: Final = Price(prompt=1_300_003, cached_prompt=130_001, completion=5_500_009)
OF_CLERK: Final = Price(prompt=2_700_013, cached_prompt=270_023, completion=9_100_019)
CHANGED: Final = {
    "USD": Price(prompt=1_900_021, cached_prompt=190_027, completion=7_000_033),
    "EUR": Price(prompt=1_700_029, cached_prompt=170_033, completion=6_600_037),
}


@dataclass(frozen=True)
class Card:
    """A price version; `adapter`: (tenant, name), None: all."""

    id: UUID
    currency: str
    adapter: tuple[str, str] | None
    begins: datetime
    price: Price

    @property
    def prices(self) -> tuple[int, int, int]:
        """In the order of `CLASSES`."""
        return self.price.prompt, self.price.cached_prompt, self.price.completion


@dataclass(frozen=True)
class World:
    """`adapters`: (tenant, name) -> id; base models have None. `cards` are all that were ever made."""

    tenants: dict[str, UUID]
    callers: tuple[Caller, ...]
    operator: str
    adapters: dict[tuple[str, str], UUID | None]
    cards: list[Card]

    def price(self, tenant: str, model: str, at: datetime) -> Card:
        """The newest card of the adapter, or of all, in the tenant's currency."""
        fit = [card for card in self.cards if card.currency == CURRENCIES[tenant] and card.begins <= at]
        own = [card for card in fit if card.adapter == (tenant, model)]
        return max(own or [card for card in fit if card.adapter is None], key=lambda card: card.begins)


async def make_world(database: Database) -> World:
    """Two tenants with limits, each with two adapters, of the same names; one adapter has a price of its own."""
    world = World({}, (), "", {}, [])
    callers = []
    async with database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
        first = await RateCards(session).create_first("USD", FIRST)
        assert first is not None
        world.cards.append(card_of(first, None))
        for name in CURRENCIES:
            tenant = await TenantRepository(session).create(name)
            world.tenants[name] = tenant.id
            session.add(Quota(tenant_id=tenant.id, **LIMITS))
            issued = await KeyRepository(session).create(tenant.id, "key", ["tenant:admin"])
            callers.append(Caller(name, issued.plaintext, (*ADAPTERS, MODEL)))
            world.adapters[name, MODEL] = None
            for number, adapter in enumerate(ADAPTERS):
                digest = f"{len(callers)}{number}" * 32
                world.adapters[name, adapter] = await add_adapter(session, tenant.id, adapter, digest)
        billings = TenantBillings(session)
        await billings.change(await billings.locked(world.tenants["other"]), {"currency": "EUR"})
        for key, price, owner in (
            (CardKey(None, None, None, "EUR"), EUROS, None),
            (CardKey(None, world.tenants["acme"], "clerk", "USD"), OF_CLERK, ("acme", "clerk")),
        ):
            world.cards.append(card_of(await RateCards(session).create(key, price, None), owner))
    return replace(world, callers=tuple(callers), operator=operator)


async def add_adapter(session: AsyncSession, tenant_id: UUID, name: str, digest: str) -> UUID:
    adapters = RegistryWriter(session, tenant_id)
    made = await adapters.get_or_create(name)
    version = await adapters.add_version(name, digest=digest, size_bytes=1, rank=8, config={}, report={})
    await AliasWriter(session, tenant_id).set(name, "production", {version.version: 100})
    return made.id


def card_of(made: RateCardDocument, adapter: tuple[str, str] | None) -> Card:
    return Card(made.id, made.currency, adapter, made.effective_from, made.price)


async def change_prices(client: httpx.AsyncClient, world: World, begins: datetime) -> None:
    """Set the prices for all, in both currencies, over HTTP."""
    for currency, price in CHANGED.items():
        body = {
            "scope": {"all": True},
            "currency": currency,
            "prices": {name: getattr(price, name) for name in ("prompt", "cached_prompt", "completion")},
            "effective_from": begins.isoformat(),
        }
        response = await client.post("/operator/v1/rate-cards", json=body)
        assert response.status_code == 201, response.text
        made = response.json()
        assert datetime.fromisoformat(made["effective_from"]) == begins
        world.cards.append(Card(UUID(made["id"]), currency, None, begins, price))
