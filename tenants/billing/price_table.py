"""Which price applies to a request: all rate cards and the tenants' currencies at one moment, in memory.

Invariant: the most specific card that has begun decides: of the adapter, then of its tenant, of the tier, for all. A version
applies from its start, inclusive, until that of the next version of its card.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from loraplex.tenants.billing.pricing import PriceVersion
from loraplex.tenants.errors import PriceMissing

# An upper bound allows for the counters' clock, which decides when a request is admitted, and for the wait until then.
NEAR: Final = timedelta(seconds=60)
MICROSECOND: Final = timedelta(microseconds=1)


class CardKey(NamedTuple):
    """What a rate card applies to: all, one tier, one tenant, or one adapter of a tenant by its name; in one currency."""

    tier: str | None
    tenant_id: UUID | None
    adapter_name: str | None
    currency: str


@dataclass(frozen=True, slots=True)
class CardVersions:
    """The versions of one card in the order of their starts."""

    starts: tuple[datetime, ...]
    versions: tuple[PriceVersion, ...]

    def at(self, time: datetime) -> PriceVersion | None:
        """The version in force; None before the first."""
        begun = bisect_right(self.starts, time)
        return self.versions[begun - 1] if begun else None

    def starts_within(self, after: datetime, until: datetime) -> tuple[datetime, ...]:
        """The starts later than `after`, until `until` inclusive."""
        return self.starts[bisect_right(self.starts, after) : bisect_right(self.starts, until)]


@dataclass(frozen=True, slots=True)
class TenantCurrency:
    """The currency of a tenant, and the one that replaces it at a month's begin."""

    currency: str
    next_currency: str | None = None
    changes_at: datetime | None = None

    def at(self, time: datetime) -> str:
        """The currency in force."""
        if self.next_currency is not None and self.changes_at is not None and time >= self.changes_at:
            return self.next_currency
        return self.currency


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """All cards, and the currencies of tenants that have one of their own; others have `default_currency`."""

    cards: Mapping[CardKey, CardVersions] = field(default_factory=dict)
    currencies: Mapping[UUID, TenantCurrency] = field(default_factory=dict)
    default_currency: str

    def currency(self, tenant_id: UUID, at: datetime) -> str:
        """The currency that the tenant is charged in."""
        own = self.currencies.get(tenant_id)
        return self.default_currency if own is None else own.at(at)

    def price(self, tenant_id: UUID, tier: str, adapter_name: str | None, at: datetime) -> PriceVersion:
        """The price of a request that is admitted at that time. Raises `PriceMissing`."""
        cards = self._cards(tenant_id, tier, adapter_name, self.currency(tenant_id, at))
        found = _in_force(cards, at)
        if found is None:
            raise self._missing(tenant_id, tier, at)
        return found

    def prices_near(
        self, tenant_id: UUID, tier: str, adapter_name: str | None, at: datetime
    ) -> list[PriceVersion]:
        """Every price of a request that is admitted at most `NEAR` before or after that time. Raises `PriceMissing` without any."""
        near = []
        for currency, begin, end in self._spans(tenant_id, at - NEAR, at + NEAR):
            cards = self._cards(tenant_id, tier, adapter_name, currency)
            changes = {start for card in cards for start in card.starts_within(begin, end)}
            for moment in (begin, *changes):
                version = _in_force(cards, moment)
                if version is not None:
                    near.append(version)
        if not near:
            raise self._missing(tenant_id, tier, at)
        return near

    def _spans(
        self, tenant_id: UUID, first: datetime, last: datetime
    ) -> Iterator[tuple[str, datetime, datetime]]:
        """The currencies from `first` to `last`, each with its first and its last moment."""
        own = self.currencies.get(tenant_id)
        changes_at = None if own is None else own.changes_at
        if changes_at is not None and first < changes_at <= last:
            yield self.currency(tenant_id, first), first, changes_at - MICROSECOND
            first = changes_at
        yield self.currency(tenant_id, last), first, last

    def _cards(
        self, tenant_id: UUID, tier: str, adapter_name: str | None, currency: str
    ) -> list[CardVersions]:
        """The cards that cover such a request, the most specific first."""
        keys = [
            CardKey(None, tenant_id, None, currency),
            CardKey(tier, None, None, currency),
            CardKey(None, None, None, currency),
        ]
        if adapter_name is not None:
            keys.insert(0, CardKey(None, tenant_id, adapter_name, currency))
        return [card for key in keys if (card := self.cards.get(key)) is not None]

    def _missing(self, tenant_id: UUID, tier: str, at: datetime) -> PriceMissing:
        currency = self.currency(tenant_id, at)
        return PriceMissing(
            f"there is no price in {currency}: no rate card in {currency} covers the tenant {tenant_id}, its tier {tier}, or all"
        )


def _in_force(cards: Iterable[CardVersions], at: datetime) -> PriceVersion | None:
    """The version of the first card that has begun."""
    for card in cards:
        version = card.at(at)
        if version is not None:
            return version
    return None
