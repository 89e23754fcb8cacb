"""Counters agree with the ledger, or it is said how they differ."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import psycopg
import pytest
from tests.tenants.counters.limited_tenant import LimitedTenant, admit
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.platform.drills.drill import check_quotas
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.valkey import forget_all_tenants, open_valkey


@pytest.fixture
async def counters(valkey_url: str) -> AsyncIterator[Counters]:
    client = open_valkey(valkey_url)
    yield Counters(client, command_s=10.0, bulk_s=10.0)
    await client.aclose()


async def counted(database: Database, counters: Counters) -> UsingTenant:
    """A tenant with a settled request, and counters that know it."""
    tenant = make_tenant(database.url)
    key = next(iter(tenant.keys.values()))
    settle(database.url, tenant, [Used(None, key, datetime.now(UTC), amount_pico=77)])
    ledger = UsageLedger(database)
    taken = await ledger.take_snapshot(await ledger.raise_fence(tenant.id))
    assert taken is not None
    await counters.rebuild(tenant.id, *taken)
    await ledger.close()
    return tenant


async def test_counters_that_agree_are_exact_and_others_are_not(
    database: Database, counters: Counters, valkey_url: str
) -> None:
    tenant = await counted(database, counters)
    assert (await check_quotas(database, valkey_url, tenant.id, 60.0)).kept
    with psycopg.connect(database.url) as connection:
        connection.execute("UPDATE usage_totals SET tokens = tokens + 3 WHERE level = 'tenant'")
    found = await check_quotas(database, valkey_url, tenant.id, 0.0)
    assert not found.kept and "+3 tokens" in found.found


async def test_a_request_that_stays_reserved_is_named(
    database: Database, counters: Counters, valkey_url: str
) -> None:
    tenant = await counted(database, counters)
    policy = await counters.publish_policy(tenant.id, 0)
    await admit(counters, LimitedTenant(tenant_id=tenant.id).request(policy_epoch=policy, base=True))
    found = await check_quotas(database, valkey_url, tenant.id, 0.0)
    assert (found.kept, found.found) == (False, "1 requests are still reserved")


async def test_counters_that_are_lost_are_no_agreement(
    database: Database, counters: Counters, valkey_url: str
) -> None:
    tenant = await counted(database, counters)
    client = open_valkey(valkey_url)
    assert await forget_all_tenants(client) == 1
    await client.aclose()
    found = await check_quotas(database, valkey_url, tenant.id, 0.0)
    assert (found.kept, found.found) == (False, "the counters are lost")
