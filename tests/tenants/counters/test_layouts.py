"""Gateways of two releases at one Valkey: what one layout of the counters consists of, and what happens where two meet."""

import re
from collections.abc import Awaitable, Callable
from hashlib import sha1
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from tests.tenants.admission.gateways import SETTINGS, all_shipped, make_tenant_with_gateways, usage
from tests.tenants.counters.limited_tenant import (
    EMPTY,
    LimitedTenant,
    admit,
    contents,
    deny,
    failed,
    keys_of,
    reserved_of,
    usage_of,
    with_counters,
)

from loraplex.tenants.counters.counter_replies import CountersMissing
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.script_runner import Script
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.database import Database
from loraplex.tenants.errors import CountersNewer, QuotaUnavailable, RateLimited
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import tenant_key

OURS: Final = ("local LAYOUT = 2\n", "local GROUPED = 2\n", "local epoch = not")
NEXT: Final = ("local LAYOUT = 3\n", "local GROUPED = 2\n", "local epoch = layout >= 3 and not")
BEFORE: Final = ("local LAYOUT = 1\n", "local GROUPED = 1\n", "local epoch = not")
KEYS: Final[dict[str, set[str]]] = {
    "state": {"epoch", "policy", "clock", "empty_at", "buckets", "layout"},
    "denials": set(),
    "<n>:use:<subject>:<period>": {"tokens", "amount", "reserved_tokens", "reserved_amount"},
    "<n>:rate:<subject>": {
        *("requests", "requests_at", "tokens", "tokens_at", "tokens_limit"),
        *("held:<n>", "sequences:<n>"),
    },
    "<n>:leases:<subject>": set(),
    "<n>:open": {"<id>"},
    "<n>:ended": set(),
    # The release before ignores it, and the last field of a record: it counts no sessions.
    "session:s": {"<subject>", "held:<n>:<subject>"},
    "sessions": set(),
}
RECORD_FIELDS: Final = 10
RATES = QuotaLimits(requests_per_minute=5, tokens_per_minute=50)


def of_layout(counters: Counters, lines: tuple[str, ...]) -> Counters:
    """Counters of a release with another layout."""
    for name, script in counters._scripts.items():
        text = script.text
        for ours, others in zip(OURS, lines, strict=True):
            assert text.count(ours) == 1
            text = text.replace(ours, others)
        counters._scripts[name] = Script(text, sha1(text.encode()).hexdigest())
    return counters


def of_next_layout(counters: Counters) -> Counters:
    """Counters of a release with the next layout."""
    return of_layout(counters, NEXT)


@pytest.fixture
def newer(client: Redis) -> Counters:
    return of_next_layout(Counters(client, command_s=10.0, bulk_s=10.0))


def pattern(name: str) -> str:
    """A name with what differs between tenants, periods and epochs replaced."""
    name = re.sub(r"(key|adapter):[0-9a-f-]{36}|tenant", "<subject>", name)
    name = re.sub(r"[dm]:\d{4}-\d\d(-\d\d)?$", "<period>", name)
    return re.sub(r"^\d+(?=:)|(?<=:)\d+(?=$|:<subject>$)", "<n>", re.sub(r"^[0-9a-f-]{36}$", "<id>", name))


async def test_the_keys_and_fields_of_this_layout(counters: Counters, client: Redis) -> None:
    """Something new here is read by the release before this one: is it ignored there? If not, LAYOUT must grow."""
    tenant = await with_counters(counters, LimitedTenant(RATES, RATES, RATES))
    ended = tenant.request(session="s")
    await admit(counters, ended)
    await counters.settle(tenant.tenant_id, ended.id, usage_of(7, 700))
    await admit(counters, tenant.request(session="s"))
    await deny(counters, tenant.request(tokens=50))
    prefix = tenant_key(tenant.tenant_id, "")
    found: dict[str, set[str]] = {}
    for key in await keys_of(client, tenant.tenant_id):
        fields = await client.hkeys(key) if await client.type(key) == b"hash" else []
        names = {pattern(field.decode()) for field in fields if isinstance(field, bytes)}
        found.setdefault(pattern(key.removeprefix(prefix)), set()).update(names)
    assert found == KEYS
    (record,) = await client.hvals(f"{prefix}1:open")
    assert len(record.split()) == RECORD_FIELDS
    assert await client.hget(f"{prefix}state", "layout") == b"2"


async def test_counters_of_a_release_that_stored_no_layout_go_on(counters: Counters, client: Redis) -> None:
    tenant = await with_counters(counters, LimitedTenant(RATES))
    await admit(counters, tenant.request())
    await client.hdel(tenant_key(tenant.tenant_id, "state"), "layout")
    for _ in range(4):
        await admit(counters, tenant.request())
    assert failed(await deny(counters, tenant.request())) == [
        ("tenant", "requests_per_minute"),
        ("tenant", "tokens_per_minute"),
    ]


async def test_counters_of_the_release_without_groups_serve_whoever_is_in_none(
    counters: Counters, client: Redis
) -> None:
    """The first request of a group discards them: they do not know what the keys below the root used."""
    before = of_layout(Counters(client, command_s=10.0, bulk_s=10.0), BEFORE)
    tenant = await with_counters(before, LimitedTenant(RATES, key=RATES))
    await admit(before, tenant.request())
    child = tenant.child()
    for _ in range(3):
        await admit(counters, tenant.request())
    assert await counters.reserve(child.request()) == CountersMissing()
    assert await before.reserve(tenant.request()) == CountersMissing()
    assert await counters.rebuild(tenant.tenant_id, 1, EMPTY) == 0, "a rebuild of the discarded epoch is late"
    assert await counters.rebuild(tenant.tenant_id, 2, EMPTY) == 2
    for _ in range(5):
        await admit(counters, child.request())
    assert ("group", "requests_per_minute") in failed(await deny(counters, child.request()))
    with pytest.raises(CountersNewer):
        await before.reserve(tenant.request())


async def test_counters_of_a_newer_layout_are_neither_read_nor_written(
    counters: Counters, newer: Counters, client: Redis
) -> None:
    tenant = await with_counters(newer, LimitedTenant(RATES))
    open_request = tenant.request()
    reserved = reserved_of(open_request, await admit(newer, open_request), epoch=1)
    before, tenant_id = await contents(client, tenant.tenant_id), tenant.tenant_id
    steps: list[Callable[[], Awaitable[Any]]] = [
        lambda: counters.reserve(tenant.request()),
        lambda: counters.settle(tenant_id, open_request.id, usage_of(7), charge=reserved),
        lambda: counters.settle_early(reserved, usage_of(7)),
        lambda: counters.reap(tenant_id, open_request.id, usage_of(7)),
        lambda: counters.heartbeat(tenant_id, [reserved]),
        lambda: counters.expired(tenant_id),
        lambda: counters.rebuild(tenant_id, 9, EMPTY),
        lambda: counters.invalidate(tenant_id),
        lambda: counters.read(tenant_id, tenant.subjects),
        lambda: counters.settled(tenant_id),
        lambda: counters.publish_policy(tenant_id, 99),
        lambda: counters.explain(tenant_id, "r"),
    ]
    for step in steps:
        with pytest.raises(CountersNewer):
            await step()
    assert await contents(client, tenant_id) == before


async def test_counters_of_an_older_layout_are_rebuilt_with_empty_buckets(
    counters: Counters, newer: Counters
) -> None:
    tenant = await with_counters(counters, LimitedTenant(RATES))
    open_request = tenant.request()
    reserved = reserved_of(open_request, await admit(counters, open_request), epoch=1)
    assert await newer.reserve(tenant.request()) == CountersMissing()
    snapshot = CounterSnapshot(policy_epoch=3, totals=(), reservations=(reserved,))
    assert await newer.rebuild(tenant.tenant_id, 1, snapshot) == 1, "the older counters are of that epoch"
    assert await newer.reserve(tenant.request()) == CountersMissing()
    assert await newer.rebuild(tenant.tenant_id, 2, snapshot) == 2
    assert failed(await deny(newer, tenant.request())) == [
        ("tenant", "requests_per_minute"),
        ("tenant", "tokens_per_minute"),
    ]
    assert (await newer.settle(tenant.tenant_id, open_request.id, usage_of(7))).found


async def test_gateways_of_two_layouts_never_exceed_a_limit(database: Database, valkey_url: str) -> None:
    """What the older one admitted is counted by the newer one, also while it runs; then the older one refuses budgets."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=200)
    async with tenant.gateway(SETTINGS) as older, tenant.gateway(SETTINGS) as newer:
        of_next_layout(newer.counters)
        first = [await older.admit(tenant.request()) for _ in range(3)]
        await older.settle(first[0], usage(first[0]))
        admitted = []
        with pytest.raises(RateLimited):
            while True:
                admitted.append(await newer.admit(tenant.request()))
        assert 15 + 30 * (2 + len(admitted)) <= 200 < 15 + 30 * (3 + len(admitted))
        with pytest.raises(QuotaUnavailable):
            await older.admit(tenant.request())
        for reservation in first[1:]:
            await older.settle(reservation, usage(reservation))
        for reservation in admitted:
            await newer.settle(reservation, usage(reservation))
        await older.maintenance.shipping.ship()
        await all_shipped(newer)
    (written,) = await tenant.rows("SELECT count(*) AS requests FROM usage_records")
    assert written == {"requests": len(first) + len(admitted)}


async def test_newer_counters_of_one_tenant_cost_no_other_its_counters(
    database: Database, valkey_url: str
) -> None:
    """They are no failure of Valkey: the older gateway serves that tenant by its share, and reports it once."""
    upgraded = await make_tenant_with_gateways(database, valkey_url, "upgraded", concurrent_requests=100)
    other = await make_tenant_with_gateways(database, valkey_url, "other", tokens_per_day=1000)
    with capture_logs() as logs:
        async with upgraded.gateway(SETTINGS) as older, upgraded.gateway(SETTINGS) as newer:
            before = await older.admit(upgraded.request())
            await upgraded.shipped()
            of_next_layout(newer.counters)
            counted = await newer.admit(upgraded.request())
            shared = [await older.admit(upgraded.request()) for _ in range(5)]
            assert not before.degraded and not counted.degraded and all(each.degraded for each in shared)
            ours = await older.admit(other.request())
            assert not older.degraded and not ours.degraded
            await older.maintenance.heartbeat()
            for reservation in (before, ours, *shared):
                await older.settle(reservation, usage(reservation))
            await upgraded.shipped()
            older.rebuild_later({upgraded.tenant_id})
            older.maintenance.reaper.overdue.add(upgraded.tenant_id)
            await older.maintenance.retry()
            await older.maintenance.reconciliation.reconcile()
            assert not older.maintenance.requests.pending_counter_updates
            assert not older.maintenance.requests.to_rebuild
            assert not older.maintenance.requests.active
            assert not older.degraded
            assert (await newer.admit(upgraded.request())).epoch == counted.epoch, (
                "no fence outdates its counters"
            )
            await newer.settle(counted, usage(counted))
            await all_shipped(newer)
    (written,) = await upgraded.rows("SELECT count(*) AS requests FROM usage_records")
    assert written == {"requests": 8}
    assert len([each for each in logs if "newer release" in each["event"]]) == 1
