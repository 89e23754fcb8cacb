"""The price of a request: the most specific card in force, at every moment near a boundary, in the tenant's currency."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.billing.price_table import NEAR, CardKey, CardVersions, PriceTable, TenantCurrency
from loraplex.tenants.billing.pricing import Price, PriceVersion
from loraplex.tenants.errors import PriceMissing

TENANT, OTHER = UUID(int=1), UUID(int=2)
MONTH = datetime(2026, 12, 1, tzinfo=UTC)
STEP = timedelta(microseconds=1)
# Close enough together that several boundaries are near one moment.
MOMENTS = st.integers(-200, 200).map(lambda seconds: MONTH + timedelta(seconds=seconds))
PRICES = st.builds(
    Price, prompt=st.integers(5, 50), cached_prompt=st.integers(0, 5), completion=st.integers(0, 50)
)
KEYS = st.sampled_from(
    [
        CardKey(tier, tenant_id, adapter_name, currency)
        for currency in ("USD", "EUR")
        for tier, tenant_id, adapter_name in (
            (None, None, None),
            ("gold", None, None),
            ("free", None, None),
            (None, TENANT, None),
            (None, OTHER, None),
            (None, TENANT, "poet"),
            (None, TENANT, "clerk"),
            (None, OTHER, "poet"),
        )
    ]
)
CURRENCIES = st.builds(
    TenantCurrency, st.sampled_from(["USD", "EUR"]), st.sampled_from([None, "USD", "EUR"]), st.just(MONTH)
)


@dataclass(frozen=True)
class Request:
    tenant_id: UUID
    tier: str
    adapter_name: str | None


REQUESTS = st.builds(
    Request,
    st.sampled_from([TENANT, OTHER]),
    st.sampled_from(["gold", "free"]),
    st.sampled_from([None, "poet", "clerk"]),
)


def version(price: Price, currency: str) -> PriceVersion:
    return PriceVersion(id=uuid4(), currency=currency, price=price)


@st.composite
def cards(draw: st.DrawFn) -> dict[CardKey, CardVersions]:
    made = {}
    for key in draw(st.sets(KEYS)):
        starts = tuple(sorted(draw(st.sets(MOMENTS, min_size=1, max_size=4))))
        made[key] = CardVersions(starts, tuple(version(draw(PRICES), key.currency) for _ in starts))
    return made


@st.composite
def tables(draw: st.DrawFn) -> PriceTable:
    own = draw(st.dictionaries(st.sampled_from([TENANT, OTHER]), CURRENCIES))
    return PriceTable(cards=draw(cards()), currencies=own, default_currency="USD")


def expected(table: PriceTable, request: Request, at: datetime) -> PriceVersion | None:
    """The rule, without any search: every version in force of every card that covers the request, the most specific one."""
    currency = table.currency(request.tenant_id, at)
    covering = []
    for key, card in table.cards.items():
        covers = (
            key.currency == currency
            and key.tier in (None, request.tier)
            and key.tenant_id in (None, request.tenant_id)
            and key.adapter_name in (None, request.adapter_name)
        )
        begun = [each for start, each in zip(card.starts, card.versions, strict=True) if start <= at]
        if covers and begun:
            rank = (key.adapter_name is not None, key.tenant_id is not None, key.tier is not None)
            covering.append((rank, begun[-1]))
    return max(covering, key=lambda each: each[0])[1] if covering else None


@given(tables(), REQUESTS, MOMENTS)
def test_the_most_specific_card_in_force_decides(table: PriceTable, request: Request, at: datetime) -> None:
    wanted = expected(table, request, at)
    if wanted is None:
        with pytest.raises(PriceMissing, match=f"no price in {table.currency(request.tenant_id, at)}"):
            table.price(request.tenant_id, request.tier, request.adapter_name, at)
    else:
        assert table.price(request.tenant_id, request.tier, request.adapter_name, at) == wanted


@given(tables(), REQUESTS, MOMENTS, st.data())
def test_what_is_reserved_covers_an_admission_at_any_time_near(
    table: PriceTable, request: Request, at: datetime, data: st.DataObject
) -> None:
    asked = request.tenant_id, request.tier, request.adapter_name
    prompt, completion = data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, 10**6))
    boundaries = [start for card in table.cards.values() for start in card.starts] + [MONTH]
    near = {at - NEAR, at, at + NEAR, *boundaries, *(each - STEP for each in boundaries)}
    bounds = []
    for moment in near:
        found = expected(table, request, moment)
        if found is not None and abs(moment - at) <= NEAR:
            bounds.append(found.price.bound_nano(prompt, completion))
    if not bounds:
        with pytest.raises(PriceMissing):
            table.prices_near(*asked, at)
        return
    # Exactly the dearest price near: a larger bound would refuse requests that have room.
    prices = [each.price for each in table.prices_near(*asked, at)]
    assert max(price.bound_nano(prompt, completion) for price in prices) == max(bounds)


def test_a_price_changes_exactly_at_its_start() -> None:
    old, new = version(Price(prompt=1), "USD"), version(Price(prompt=2), "USD")
    card = CardVersions((MONTH - NEAR, MONTH), (old, new))
    table = PriceTable(cards={CardKey(None, None, None, "USD"): card}, default_currency="USD")
    assert table.price(TENANT, "gold", None, MONTH - STEP) is old
    assert table.price(TENANT, "gold", None, MONTH) is new
    with pytest.raises(PriceMissing):
        table.price(TENANT, "gold", None, MONTH - NEAR - STEP)


def test_a_currency_changes_exactly_at_the_begin_of_its_month() -> None:
    dollars, euros = version(Price(prompt=1), "USD"), version(Price(prompt=2), "EUR")
    ever = (MONTH - NEAR,)
    table = PriceTable(
        cards={
            CardKey(None, None, None, "USD"): CardVersions(ever, (dollars,)),
            CardKey(None, None, None, "EUR"): CardVersions(ever, (euros,)),
        },
        currencies={TENANT: TenantCurrency("USD", "EUR", MONTH)},
        default_currency="USD",
    )
    assert table.price(TENANT, "gold", None, MONTH - STEP) is dollars
    assert table.price(TENANT, "gold", None, MONTH) is euros
    assert table.price(OTHER, "gold", None, MONTH) is dollars
