"""Versions of rate cards, and a month's usage under a draft. Prices in micro-units of money per million tokens, as integers."""

from typing import Literal
from uuid import UUID

from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.records import Pico, Record, UtcTime


class AllScope(Record):
    all: Literal[True] = True


class TierScope(Record):
    tier: str


class TenantScope(Record):
    tenant_id: UUID


class AdapterScope(Record):
    tenant_id: UUID
    adapter: str


Scope = AllScope | TierScope | TenantScope | AdapterScope


class PricesDocument(Record):
    """Micro-units of money per million tokens. `reasoning` null: as `completion`, in which these tokens are."""

    prompt: int
    cached_prompt: int
    completion: int
    reasoning: int | None = None


class RateCardDocument(Record):
    """One version of a card. `id` is the `price_version_id` of usage and invoice lines. It applies from `effective_from` until
    `effective_to`, exclusive; null: until a later version begins. Of all cards that cover a request, the most specific applies:
    that of its adapter, its tenant, its tier, or all.
    """

    id: UUID
    version: int
    scope: Scope
    currency: str
    prices: PricesDocument
    effective_from: UtcTime
    effective_to: UtcTime | None
    created_at: UtcTime

    @property
    def key(self) -> CardKey:
        """The card of the version."""
        given = dict(self.scope)
        return CardKey(given.get("tier"), given.get("tenant_id"), given.get("adapter"), self.currency)

    @property
    def price(self) -> Price:
        """The prices, as they charge."""
        return Price(**dict(self.prices))


class RatedUsageDocument(Record):
    """A tenant's usage of the month in one currency. Amounts in pico-units of the currency, as decimal texts."""

    tenant_id: UUID
    name: str
    currency: str
    billed_pico: Pico
    draft_pico: Pico


class RatedTotalDocument(Record):
    """The usage of all tenants in one currency."""

    currency: str
    billed_pico: Pico
    draft_pico: Pico


def scope_document(key: CardKey) -> Scope:
    """Return what a card applies to."""
    if key.tenant_id is None:
        return AllScope() if key.tier is None else TierScope(tier=key.tier)
    if key.adapter_name is None:
        return TenantScope(tenant_id=key.tenant_id)
    return AdapterScope(tenant_id=key.tenant_id, adapter=key.adapter_name)
