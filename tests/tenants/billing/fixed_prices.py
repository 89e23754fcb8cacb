"""Prices without a database: one card for all, in force at all times."""

from datetime import UTC, datetime
from uuid import UUID

from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.price_table import CardKey, CardVersions, PriceTable
from loraplex.tenants.billing.pricing import Price, PriceVersion

EVER = datetime.min.replace(tzinfo=UTC)


def fixed_version(price: Price, currency: str = "USD") -> PriceVersion:
    return PriceVersion(id=UUID(int=1), currency=currency, price=price)


def fixed_prices(price: Price, currency: str = "USD") -> PriceBook:
    card = CardVersions((EVER,), (fixed_version(price, currency),))
    return PriceBook(PriceTable(cards={CardKey(None, None, None, currency): card}, default_currency=currency))
