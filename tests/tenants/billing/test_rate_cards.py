"""Versions of a card: every sequence of creations leaves exactly one price at any time from the first start on."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import RateCardDocument
from loraplex.tenants.billing.rate_cards import EVER, NOTICE, RateCards, scope_of
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InUse

ALL = CardKey(None, None, None, "USD")
CHEAP, DEAR = Price(prompt=1), Price(prompt=2)
HOUR = timedelta(hours=1)


class Undone(Exception):
    """Rolls a transaction back at the end of an example."""


async def create(
    database: Database, key: CardKey = ALL, price: Price = CHEAP, effective_from: datetime | None = None
) -> RateCardDocument:
    async with database.as_operator() as session:
        return await RateCards(session).create(key, price, effective_from)


async def versions(database: Database, **filters: object) -> list[RateCardDocument]:
    """Oldest first."""
    async with database.as_operator() as session:
        return [*await RateCards(session).page(filters, None, 100)][::-1]


# Hours from now; None is now. Several of one moment are refused.
STARTS = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(starts=STARTS)
async def test_ranges_never_overlap_or_leave_gaps(database: Database, starts: list[int | None]) -> None:
    now = datetime.now(UTC)
    with pytest.raises(Undone):
        async with database.as_operator() as session:
            cards, wanted = RateCards(session), dict[datetime, UUID]()
            for number, start in enumerate(starts):
                begins = None if start is None else now + start * HOUR
                if begins in wanted:
                    with pytest.raises(InUse, match="begins at .* already"):
                        await cards.create(ALL, Price(prompt=number), begins)
                    continue
                made = await cards.create(ALL, Price(prompt=number), begins)
                assert begins in (None, made.effective_from)
                wanted[made.effective_from] = made.id
            found = sorted(await cards.page({}, None, 100), key=lambda each: each.effective_from)
            assert {each.effective_from: each.id for each in found} == wanted
            assert all(one.effective_to == next_.effective_from for one, next_ in pairwise(found))
            assert found[-1].effective_to is None
            assert sorted(each.version for each in found) == [*range(1, len(found) + 1)]
            raise Undone


async def test_a_new_version_ends_its_predecessor_at_that_moment(database: Database) -> None:
    first = await create(database)
    begins = datetime.now(UTC) + HOUR
    second = await create(database, price=DEAR, effective_from=begins)
    assert (second.effective_from, second.effective_to, second.version) == (begins, None, 2)
    assert [(each.id, each.effective_to) for each in await versions(database)] == [
        (first.id, begins),
        (second.id, None),
    ]
    between = await create(database, effective_from=begins - HOUR / 2)
    assert (between.effective_to, between.version) == (begins, 3)


async def test_what_begins_at_once_begins_when_every_gateway_knows_it(database: Database) -> None:
    asked = datetime.now(UTC)
    at_once = await create(database)
    soon = await create(
        database, CardKey("gold", None, None, "USD"), effective_from=asked + timedelta(seconds=1.5)
    )
    for made in (at_once, soon):
        assert NOTICE <= made.effective_from - asked <= NOTICE + timedelta(seconds=60)


async def test_the_past_is_refused(database: Database) -> None:
    for past in (timedelta(microseconds=1), timedelta(days=400)):
        with pytest.raises(InUse, match="begin in the past"):
            await create(database, effective_from=datetime.now(UTC) - past)
    assert await versions(database) == []


async def test_creations_at_once_follow_each_other(database: Database) -> None:
    made = await asyncio.gather(*(create(database) for _ in range(3)))
    assert sorted(each.version for each in made) == [1, 2, 3]
    assert len({each.effective_from for each in made}) == 3


async def test_the_first_card_is_made_once_and_its_currency_is_the_installations(database: Database) -> None:
    async def first(currency: str) -> RateCardDocument | None:
        async with database.as_operator() as session:
            return await RateCards(session).create_first(currency, CHEAP)

    tenant_id = await make_tenant(database)
    # A card of one tenant prices nothing for the others.
    await create(database, CardKey(None, tenant_id, None, "EUR"))
    made = [each for each in await asyncio.gather(*(first("USD") for _ in range(3))) if each is not None]
    assert [(each.key, each.effective_from, each.version) for each in made] == [(ALL, EVER, 1)]
    assert await first("EUR") is None


async def test_pages_filters_and_scopes(database: Database) -> None:
    tenant_id = await make_tenant(database)
    keys = [
        ALL,
        CardKey("gold", None, None, "EUR"),
        CardKey(None, tenant_id, None, "USD"),
        CardKey(None, tenant_id, "poet", "USD"),
    ]
    made = [await create(database, key) for key in keys]
    assert (
        [scope_of(key) for key in keys]
        == [scope_of(each.key) for each in made]
        == ["all", "tier", "tenant", "adapter"]
    )
    assert [each.key for each in await versions(database)] == keys
    assert [each.key for each in await versions(database, tenant_id=tenant_id)] == keys[2:]
    assert [each.key for each in await versions(database, currency="EUR")] == keys[1:2]
    assert [each.key for each in await versions(database, tier="gold")] == keys[1:2]
    assert [each.key for each in await versions(database, adapter="poet")] == keys[3:]
    async with database.as_operator() as session:
        assert [each.id for each in await RateCards(session).page({}, made[2].id, 1)] == [made[1].id]


async def test_a_tenant_sees_the_cards_that_cover_it(database: Database) -> None:
    mine, other = await make_tenant(database), await make_tenant(database, "rival")
    seen = [
        ALL,
        CardKey("gold", None, None, "USD"),
        CardKey(None, mine, None, "USD"),
        CardKey(None, mine, "poet", "USD"),
    ]
    unseen = [
        CardKey("free", None, None, "USD"),
        CardKey(None, None, None, "EUR"),
        CardKey(None, other, None, "USD"),
    ]
    for key in (*seen, *unseen):
        await create(database, key)
    async with database.as_tenant(mine) as session:
        found = await RateCards(session).covering(mine, "gold", ["USD"], None, 100)
        assert [each.key for each in found] == seen[::-1]
        # The database itself hides the cards of other tenants, and their prices.
        for table in ("rate_cards", "price_versions"):
            assert await session.scalar(text(f"SELECT count(*) FROM {table}")) == len(seen) + len(unseen) - 1
        behind = await RateCards(session).covering(mine, "gold", ["USD"], found[0].id, 1)
        assert behind == found[1:2]
