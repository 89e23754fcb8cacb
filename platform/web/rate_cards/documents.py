"""Request and response schemas of rate cards. Prices in micro-units of money per million tokens, as integers."""

from typing import Annotated, Final, Literal, Self
from uuid import UUID

from pydantic import Field, model_validator

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.services.billing.rate_cards import MONTH
from loraplex.platform.web.cursors import Listing
from loraplex.platform.web.request_bodies import RequestModel, Time
from loraplex.platform.web.responses import ResponseModel
from loraplex.platform.web.sorting import SortOrder, by_id
from loraplex.tenants.billing.preview import RatedTotal, RatedUsage
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import MAX_PRICE, Price
from loraplex.tenants.billing.rate_cards import CardVersion
from loraplex.tenants.models.billing import CURRENCY
from loraplex.tenants.names import ADAPTER_NAME, TENANT_NAME
from loraplex.tenants.records import UtcTime

BY_ID: Final[SortOrder[CardVersion, UUID]] = by_id(lambda version: version.id)
BY_TENANT: Final[SortOrder[RatedUsage, tuple[UUID, str]]] = SortOrder(
    lambda rated: (rated.tenant_id, rated.currency),
    lambda key: (str(key[0]), key[1]),
    lambda position: (UUID(str(position[0])), str(position[1])),
)
Currency = Annotated[str, Field(pattern=CURRENCY)]
PriceField = Annotated[int, Field(ge=0, le=MAX_PRICE)]
SCOPES: Final = "all: true, tier, tenant_id, or tenant_id with adapter"


class ScopeBody(RequestModel):
    """What a card applies to: `{"all": true}`, `{"tier": T}`, `{"tenant_id": ID}` or `{"tenant_id": ID, "adapter": NAME}`."""

    all: Literal[True] | None = None
    tier: Annotated[str | None, Field(pattern=TENANT_NAME)] = None
    tenant_id: UUID | None = None
    adapter: Annotated[str | None, Field(pattern=ADAPTER_NAME)] = None

    @model_validator(mode="after")
    def _names_one_scope(self) -> Self:
        given = {name for name in ("all", "tier", "tenant_id", "adapter") if getattr(self, name) is not None}
        if given not in ({"all"}, {"tier"}, {"tenant_id"}, {"tenant_id", "adapter"}):
            raise ValueError(f"it should name one of {SCOPES}")
        return self


class PricesBody(RequestModel):
    """Micro-units per million tokens. A cached prompt token costs at most what another one does."""

    prompt: PriceField
    cached_prompt: PriceField
    completion: PriceField


class NewRateCardBody(RequestModel):
    """Without `effective_from`, or with null, the price begins now. What lies within the next 2 seconds begins after them."""

    scope: ScopeBody
    currency: Currency
    prices: PricesBody
    effective_from: Time | None = None

    @property
    def key(self) -> CardKey:
        """What the card applies to."""
        return CardKey(self.scope.tier, self.scope.tenant_id, self.scope.adapter, self.currency)

    def price(self) -> Price:
        """Return the prices. Raises `InvalidField`."""
        return Price(**self.prices.model_dump())


class PreviewBody(NewRateCardBody):
    """A draft, and the month to rate (UTC); without `month`, or with null, the last one that has ended. The draft is rated as if
    it had been in force all month, whatever its `effective_from`.
    """

    month: Annotated[str | None, Field(pattern=f"^{MONTH}$")] = None


class AllScope(ResponseModel):
    all: Literal[True] = True


class TierScope(ResponseModel):
    tier: str


class TenantScope(ResponseModel):
    tenant_id: UUID


class AdapterScope(ResponseModel):
    tenant_id: UUID
    adapter: str


Scope = AllScope | TierScope | TenantScope | AdapterScope


class PricesDocument(ResponseModel):
    """Micro-units of money per million tokens."""

    prompt: int
    cached_prompt: int
    completion: int


class RateCardDocument(ResponseModel):
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


class RatedUsageDocument(ResponseModel):
    """A tenant's usage of the month in one currency. Amounts in pico-units of the currency, as decimal texts."""

    tenant_id: UUID
    name: str
    currency: str
    billed_pico: str
    draft_pico: str


class RatedTotalDocument(ResponseModel):
    """The usage of all tenants in one currency."""

    currency: str
    billed_pico: str
    draft_pico: str


class PreviewDocument(Listing[RatedUsageDocument]):
    """Every tenant with usage in the month, by id: as it was billed, and as if the draft had been in force all month. The draft
    prices what it covers unless a more specific card did. `totals` are those of all pages.
    """

    month: str
    totals: list[RatedTotalDocument]


def rated_response(rated: RatedUsage) -> RatedUsageDocument:
    return RatedUsageDocument(
        tenant_id=rated.tenant_id,
        name=rated.name,
        currency=rated.currency,
        billed_pico=str(rated.billed_pico),
        draft_pico=str(rated.draft_pico),
    )


def total_response(total: RatedTotal) -> RatedTotalDocument:
    return RatedTotalDocument(
        currency=total.currency, billed_pico=str(total.billed_pico), draft_pico=str(total.draft_pico)
    )


def version_id_of(text: str) -> UUID:
    """Parse the version id of a filter. Raises `InvalidParameter`."""
    try:
        return UUID(text)
    except ValueError:
        raise InvalidParameter("`id` must be a UUID.", param="id") from None


def rate_card_response(version: CardVersion) -> RateCardDocument:
    price = version.price
    return RateCardDocument(
        id=version.id,
        version=version.version,
        scope=scope_response(version.key),
        currency=version.key.currency,
        prices=PricesDocument(
            prompt=price.prompt, cached_prompt=price.cached_prompt, completion=price.completion
        ),
        effective_from=version.effective_from,
        effective_to=version.effective_to,
        created_at=version.created_at,
    )


def scope_response(key: CardKey) -> Scope:
    if key.tenant_id is None:
        return AllScope() if key.tier is None else TierScope(tier=key.tier)
    if key.adapter_name is None:
        return TenantScope(tenant_id=key.tenant_id)
    return AdapterScope(tenant_id=key.tenant_id, adapter=key.adapter_name)
