"""Buckets of counters that live go on into the epoch that follows theirs: nothing is given twice, and little is lost."""

from typing import Any

import pytest
from redis.asyncio import Redis
from tests.tenants.admission.gateways import make_house, usage
from tests.tenants.admission.gateways import used as tenant_use
from tests.tenants.counters.counting import EMPTY, POLICY, Customer, admit, age, deny, hold_of, used

from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.database import Database
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.reservation import ActualUsage, CounterReservation, ReservedAmounts

# So slow that a test's seconds give nothing back.
RATES = QuotaLimits(requests_per_minute=60, tokens_per_minute=6000)


@pytest.fixture
async def customer(counters: Counters) -> Customer:
    customer = Customer(tenant=RATES, key=RATES)
    await counters.seed(customer.tenant_id, 1, EMPTY)
    return customer


async def seed(counters: Counters, customer: Customer, epoch: int, *holds: ReservedAmounts) -> None:
    read = CounterSnapshot(policy_epoch=POLICY, totals=(), holds=holds)
    assert await counters.seed(customer.tenant_id, epoch, read) == epoch


async def taken(counters: Counters, customer: Customer, level: str = "tenant") -> tuple[int, int, int]:
    """Requests; tokens paid, and held aside."""
    uses = await used(counters, customer)
    tokens = uses[level, "tokens_per_minute"]
    return uses[level, "requests_per_minute"].used, tokens.used, tokens.reserved


def near(*expected: int) -> object:
    """What flows back meanwhile: two requests and 200 tokens in two seconds."""
    return tuple(
        pytest.approx(each, abs=tolerance) for each, tolerance in zip(expected, (2, 200, 0), strict=True)
    )


async def let_in(
    counters: Counters, customer: Customer, tokens: int
) -> tuple[CounterReservation, ReservedAmounts]:
    request = customer.request(tokens)
    return request, hold_of(request, await admit(counters, request), 1)


async def test_what_buckets_lack_goes_on_and_no_more(counters: Counters, customer: Customer) -> None:
    for _ in range(20):
        request, _ = await let_in(counters, customer, 100)
        await counters.settle(customer.tenant_id, request.id, ActualUsage(100, 0))
    _, hold = await let_in(counters, customer, 1000)
    before = await taken(counters, customer)
    assert before == near(21, 2000, 1000)
    for epoch in (2, 3, 4):
        await seed(counters, customer, epoch, hold)
        for level in ("tenant", "key"):
            assert await taken(counters, customer, level) == near(*before)
    assert await counters.settle(customer.tenant_id, hold.id, ActualUsage(500, 0)) == Settled(True)
    assert await taken(counters, customer) == near(21, 2500, 0)


async def test_a_subject_that_the_books_do_not_know_keeps_its_bucket(
    counters: Counters, customer: Customer
) -> None:
    """All of its requests were given back, so it has neither totals nor anything open."""
    for _ in range(20):
        request, _ = await let_in(counters, customer, 100)
        await counters.release(customer.tenant_id, request.id)
    await seed(counters, customer, 2)
    assert await taken(counters, customer, "key") == near(20, 0, 0)


async def test_a_bucket_that_nobody_touched_goes_on_filling(client: Redis, counters: Counters) -> None:
    customer = Customer(tenant=RATES)
    await seed(counters, customer, 2)
    await age(client, customer.tenant_id, 30)
    await seed(counters, customer, 3)
    assert await taken(counters, customer) == near(30, 3000, 0)


async def test_an_end_that_is_on_its_way_has_paid_its_bound(counters: Counters, customer: Customer) -> None:
    """It is in the books that the seed was read from, and the new counters will not count it."""
    _, hold = await let_in(counters, customer, 1000)
    await seed(counters, customer, 2)
    assert await taken(counters, customer) == near(1, 1000, 0)
    assert await counters.settle(customer.tenant_id, hold.id, ActualUsage(900, 0), charge=hold) == Settled(
        False
    )
    assert await taken(counters, customer) == near(1, 1000, 0)
    await seed(counters, customer, 3)
    assert await taken(counters, customer) == near(1, 1000, 0)


async def test_what_a_seed_brought_and_the_next_has_not_has_paid_too(
    counters: Counters, customer: Customer
) -> None:
    _, hold = await let_in(counters, customer, 1000)
    await seed(counters, customer, 2, hold)
    await seed(counters, customer, 3)
    assert await taken(counters, customer) == near(1, 1000, 0)


async def test_an_end_between_the_books_and_the_seed_pays_once(
    counters: Counters, customer: Customer
) -> None:
    _, hold = await let_in(counters, customer, 1000)
    assert await counters.settle(customer.tenant_id, hold.id, ActualUsage(900, 0)) == Settled(True)
    for epoch in (2, 3):
        await seed(counters, customer, epoch, hold)
        assert await taken(counters, customer) == near(1, 900, 1000)
    await seed(counters, customer, 4)
    assert await taken(counters, customer) == near(1, 900, 0)


async def test_what_was_let_in_between_is_paid_for(counters: Counters, customer: Customer) -> None:
    """The books refuse it, and it is let in again."""
    request, _ = await let_in(counters, customer, 1000)
    await seed(counters, customer, 2)
    assert not (await admit(counters, request)).repeated
    assert await taken(counters, customer) == near(2, 1000, 1000)


async def test_what_was_not_paid_yet_goes_on(client: Redis, counters: Counters) -> None:
    other = Customer()
    await counters.seed(other.tenant_id, 1, EMPTY)
    customer = Customer(tenant=RATES)
    hold = hold_of(customer.request(1000), await admit(counters, other.request()))
    await seed(counters, customer, 2, hold)
    await age(client, customer.tenant_id, 60)
    await counters.settle(customer.tenant_id, hold.id, ActualUsage(900, 0))
    await seed(counters, customer, 3)
    assert await taken(counters, customer) == near(0, 900, 0)


@pytest.mark.parametrize("lost", ["all", "forgotten", "an epoch between"])
async def test_buckets_that_may_lack_something_start_empty(
    client: Redis, counters: Counters, customer: Customer, lost: str
) -> None:
    """The counters of an epoch between may have been lost before a late seed came."""
    if lost == "all":
        await client.flushall()
    if lost == "forgotten":
        assert await counters.invalidate(customer.tenant_id)
    await seed(counters, customer, 3 if lost == "an epoch between" else 2)
    assert await taken(counters, customer) == near(60, 6000, 0)


async def test_only_the_counters_of_one_epoch_are_forgotten(counters: Counters, customer: Customer) -> None:
    assert not await counters.invalidate(customer.tenant_id, 2)
    await admit(counters, customer.request())
    assert await counters.invalidate(customer.tenant_id, 1)
    assert not await counters.invalidate(customer.tenant_id, 1)


async def test_a_rate_holds_across_seedings(client: Redis, counters: Counters) -> None:
    customer = Customer(tenant=QuotaLimits(tokens_per_minute=60))
    await counters.seed(customer.tenant_id, 1, EMPTY)
    _, hold = await let_in(counters, customer, 60)
    await seed(counters, customer, 2, hold)
    await age(client, customer.tenant_id, 60)
    await deny(counters, customer.request(2))
    await counters.settle(customer.tenant_id, hold.id, ActualUsage(60, 0))
    await seed(counters, customer, 3)
    await deny(counters, customer.request(3))
    await age(client, customer.tenant_id, 30)
    await deny(counters, customer.request(33))
    await admit(counters, customer.request(30))


async def test_an_odd_settle_costs_no_minute(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost, and it is repeated when nobody knows any more whether it was counted: the tenant is seeded."""
    house, now = await make_house(database, valkey_url, requests_per_minute=60), [0.0]
    async with house.gateway(clock=lambda: now[0]) as gateway:
        admission = await gateway.admit(house.request())
        counters, settle = gateway.upkeep.counters, gateway.upkeep.counters.settle

        async def lose(*arguments: Any, **more: Any) -> Settled:
            await settle(*arguments, **more)
            raise ValkeyUnavailable("the answer was lost")

        monkeypatch.setattr(counters, "settle", lose)
        await gateway.settle(admission, usage(admission))
        monkeypatch.setattr(counters, "settle", settle)
        now[0] += 900.0
        await gateway.upkeep.settlements.retry()
        assert await gateway.upkeep.books.epoch(house.tenant_id) == 2
        assert (await tenant_use(gateway, house.tenant_id))["requests_per_minute"].used <= 1
        await gateway.release(await gateway.admit(house.request()))
