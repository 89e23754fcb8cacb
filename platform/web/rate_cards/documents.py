"""Request schemas of rate cards, and documents of their listings. Prices in micro-units per million tokens, as integers."""

from typing import Annotated, Final, Literal, Self
from uuid import UUID

from pydantic import Field, model_validator

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.cursors import Listing
from loraplex.platform.web.request_bodies import RequestModel, Time
from loraplex.platform.web.sorting import SortOrder, by_id
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import MAX_PRICE, Price
from loraplex.tenants.billing.rate_card_records import (
    RateCardDocument,
    RatedTotalDocument,
    RatedUsageDocument,
)
from loraplex.tenants.billing.use_cases import MONTH
from loraplex.tenants.models.billing import CURRENCY
from loraplex.tenants.names import ADAPTER_NAME, TENANT_NAME

BY_ID: Final[SortOrder[RateCardDocument, UUID]] = by_id(lambda version: version.id)
BY_TENANT: Final[SortOrder[RatedUsageDocument, tuple[UUID, str]]] = SortOrder(
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
    """Micro-units per million tokens. A cached prompt token costs at most what another one does; without `reasoning`, or with null,
    a reasoning token costs what another one of a completion does.
    """

    prompt: PriceField
    cached_prompt: PriceField
    completion: PriceField
    reasoning: PriceField | None = None


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
    it had been in force all month, whatever its `effective_from`. Its tier must be one that a tenant, a card or the plan of
    sign-up has.
    """

    month: Annotated[str | None, Field(pattern=f"^{MONTH}$")] = None


class PreviewDocument(Listing[RatedUsageDocument]):
    """Every tenant with usage in the month, by id: as it was billed, and as if the draft had been in force all month. The draft
    prices what it covers unless a more specific card did. `totals` are those of all pages.
    """

    month: str
    totals: list[RatedTotalDocument]


def version_id_of(text: str) -> UUID:
    """Parse the version id of a filter. Raises `InvalidParameter`."""
    try:
        return UUID(text)
    except ValueError:
        raise InvalidParameter("`id` must be a UUID.", param="id") from None
