"""Deliveries in PostgreSQL: one for each event and endpoint, claimed by one gateway, repeated, given up, replayed."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import func, select, text
from tests.tenants.registry_records import make_tenant
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched, end

from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import CountReached, DeliveryNotFound, DeliveryPending, WebhookNotFound
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.webhooks import queries, use_cases
from loraplex.tenants.webhooks.deliveries import Attempt, Deliveries
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.records import MAX_ATTEMPTS, MAX_WEBHOOKS
from loraplex.tenants.webhooks.tables import WebhookDelivery
from loraplex.tenants.webhooks.use_cases import WebhookRules


@dataclass(frozen=True)
class First:
    """The first ten rows of a listing."""

    after: None = None
    fetch: int = 10


FIRST = First()
NOW = timedelta()
LATER = timedelta(hours=1)
END_LEASES = text("UPDATE webhook_deliveries SET due_at = now() WHERE state = 'pending'")


async def dispatch(database: Database) -> int:
    async with database.as_operator() as session:
        return await Deliveries(session).dispatch()


async def claim(
    database: Database, slots: int = 100, per_tenant: int = 100, running: dict[UUID, int] | None = None
) -> list[Attempt]:
    async with database.as_operator() as session:
        return await Deliveries(session).claim(slots, per_tenant, running or {})


async def finish(
    database: Database, attempt: Attempt, status: int | None, error: str | None, delay: timedelta = LATER
) -> str | None:
    async with database.as_operator() as session:
        return await Deliveries(session).finish(attempt, status, error, delay)


async def end_leases(database: Database) -> None:
    async with database.as_operator() as session:
        await session.execute(END_LEASES)


async def row(database: Database) -> WebhookDelivery:
    async with database.as_operator() as session:
        return (await session.scalars(select(WebhookDelivery))).one()


async def test_an_event_reaches_each_endpoint_that_wants_its_type_once(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "rival")
    first = await add_webhook(database, mine)
    second = await add_webhook(database, mine, types=["invoice.finalized", "adapter.ready"])
    await add_webhook(database, mine, types=["quota.threshold"])
    await add_webhook(database, other)
    await add_event(database, mine)
    counts = await asyncio.gather(*(dispatch(database) for _ in range(4)))
    assert sum(counts) == 1 and await dispatch(database) == 0
    claimed = await claim(database)
    assert {attempt.endpoint_id for attempt in claimed} == {first, second} and len(claimed) == 2
    assert {attempt.tenant_id for attempt in claimed} == {mine}
    assert claimed[0].data["number"] == "2026-0001" and claimed[0].attempts == 1


async def test_one_gateway_claims_a_delivery_until_its_lease_ends(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await add_webhook(database, tenant_id)
    for _ in range(20):
        await add_event(database, tenant_id)
    await dispatch(database)
    rounds = await asyncio.gather(*(claim(database, slots=7) for _ in range(4)))
    claimed = [attempt.delivery_id for each in rounds for attempt in each]
    assert len(claimed) == len(set(claimed)) and not set(claimed) & {
        attempt.delivery_id for attempt in await claim(database)
    }
    assert await claim(database) == []
    await end_leases(database)
    assert len(await claim(database)) == 20


async def test_a_result_after_the_lease_changes_nothing(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    await dispatch(database)
    (late,) = await claim(database)
    await end_leases(database)
    (current,) = await claim(database)
    assert await finish(database, late, None, "timeout") is None
    assert await finish(database, current, 204, None) == "delivered"
    assert await finish(database, late, 500, "refused") is None
    delivered = await row(database)
    assert (delivered.state, delivered.last_status, delivered.last_error) == ("delivered", 204, None)
    assert delivered.attempts == 2 and delivered.ended_at is not None


async def test_it_is_dead_after_its_last_attempt_and_a_replay_gives_it_as_many_again(
    database: Database,
) -> None:
    tenant_id = await make_tenant(database)
    endpoint_id = await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    await dispatch(database)
    for number in range(1, MAX_ATTEMPTS + 1):
        (attempt,) = await claim(database)
        state = await finish(database, attempt, 500, "refused", NOW)
        assert state == ("dead" if number == MAX_ATTEMPTS else "pending")
    assert await claim(database) == []
    dead = await row(database)
    assert (dead.attempts, dead.last_status, dead.last_error) == (MAX_ATTEMPTS, 500, "refused")
    async with unit_of_work(database, system_actor("test"), tenant_id, None) as uow:
        listed = await queries.deliveries(uow.session, tenant_id, endpoint_id, "dead", FIRST)
        assert [each.id for each in listed] == [dead.id]
        await use_cases.replay(uow, tenant_id, endpoint_id, dead.id)
        with pytest.raises(DeliveryPending):
            await use_cases.replay(uow, tenant_id, endpoint_id, dead.id)
    (again,) = await claim(database)
    assert (again.attempts, again.attempts_left) == (MAX_ATTEMPTS + 1, MAX_ATTEMPTS - 1)
    assert again.event_id == dead.event_id
    assert await finish(database, again, 200, None) == "delivered"


async def test_an_old_or_interrupted_delivery_is_given_up(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await add_webhook(database, tenant_id)
    for _ in range(3):
        await add_event(database, tenant_id)
    await dispatch(database)
    (failing, *_) = await claim(database)
    async with database.as_operator() as session:
        # One is too old for another attempt, one had its last when its gateway died, one goes on.
        old = text("UPDATE webhook_deliveries SET expires_at = now() + interval '1 minute' WHERE id = :id")
        await session.execute(old, {"id": failing.delivery_id})
    assert await finish(database, failing, None, "timeout", LATER) == "dead"
    async with database.as_operator() as session:
        one = "(SELECT id FROM webhook_deliveries WHERE state = 'pending' LIMIT 1)"
        await session.execute(text(f"UPDATE webhook_deliveries SET attempts_left = 0 WHERE id = {one}"))
        assert await Deliveries(session).give_up() == 0
        await session.execute(END_LEASES)
        assert await Deliveries(session).oldest_s() >= 0
        assert await Deliveries(session).give_up() == 1
        found = await session.execute(select(WebhookDelivery.state, WebhookDelivery.last_error))
    states = Counter((state, error) for state, error in found)
    assert states == {("dead", "timeout"): 1, ("dead", "interrupted"): 1, ("pending", None): 1}


async def test_a_tenant_with_many_deliveries_leaves_slots_to_others(database: Database) -> None:
    tenants = [await make_tenant(database, name) for name in ("busy", "second", "third")]
    for tenant_id, events in zip(tenants, (30, 2, 2), strict=True):
        await add_webhook(database, tenant_id)
        for _ in range(events):
            await add_event(database, tenant_id)
    await dispatch(database)
    first = Counter(attempt.tenant_id for attempt in await claim(database, slots=100, per_tenant=4))
    assert first == dict(zip(tenants, (4, 2, 2), strict=True))
    more = await claim(database, slots=100, per_tenant=4, running={tenants[0]: 3})
    assert Counter(attempt.tenant_id for attempt in more) == {tenants[0]: 1}
    assert await claim(database, slots=100, per_tenant=4, running={tenants[0]: 5}) == []
    assert len(await claim(database, slots=2, per_tenant=4)) == 2


async def test_a_deleted_tenant_gets_nothing_more(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    await dispatch(database)
    async with database.as_operator() as session:
        await TenantDeletions(session).begin(tenant_id)
    assert await claim(database) == []


async def test_an_endpoint_takes_its_deliveries_along(database: Database) -> None:
    tenant_id = await make_tenant(database)
    endpoint_id = await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    await dispatch(database)
    (attempt,) = await claim(database)
    async with unit_of_work(database, system_actor("test"), tenant_id, None) as uow:
        await use_cases.delete(uow, tenant_id, endpoint_id)
    assert await finish(database, attempt, 204, None) is None
    async with database.as_operator() as session:
        assert await session.scalar(select(func.count()).select_from(WebhookDelivery)) == 0


async def test_endpoints_are_bounded_also_when_added_at_once(database: Database) -> None:
    tenant_id, other = await make_tenant(database, "acme"), await make_tenant(database, "rival")
    rules = WebhookRules(WebhookSecrets(lambda *_: bytes(32)), allow_private=False)

    async def create() -> None:
        async with unit_of_work(database, system_actor("test"), tenant_id, None) as uow:
            await use_cases.create(uow, tenant_id, rules, "https://example.com/", ["adapter.ready"])

    for _ in range(MAX_WEBHOOKS - 1):
        await add_webhook(database, tenant_id)
    added = await asyncio.gather(*(create() for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(each, CountReached) for each in added) == 2
    await add_webhook(database, other)


async def test_deliveries_of_another_tenant_do_not_exist(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "rival")
    theirs, own = await add_webhook(database, other), await add_webhook(database, mine)
    await add_event(database, other)
    delivery_id = await dispatched(database, theirs)
    await end(database, delivery_id, "dead")
    async with database.as_tenant(mine) as session:
        with pytest.raises(WebhookNotFound):
            await queries.deliveries(session, mine, theirs, None, FIRST)
        with pytest.raises(DeliveryNotFound):
            await queries.sent_event(session, mine, own, delivery_id)
