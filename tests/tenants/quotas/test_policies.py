"""Policies are read once per epoch and never applied to a request of another; reading very many limits blocks no request."""

import asyncio
import gc
import time
from collections.abc import Iterator
from uuid import UUID

import pytest
from sqlalchemy import text
from tests.tenants.admission.gateways import TenantWithGateways, make_tenant_with_gateways
from tests.tenants.registry_records import RegistryWriter
from tests.tenants.registry_records import delete as delete_of

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PolicyStale
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import Quota
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.policies import Load, Policies, TenantPolicy

TENANT = UUID(int=1)
MANY = 5_000
MANY_KEYS = """
    INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes)
    SELECT gen_random_uuid(), :tenant, lpad(number::text, 12, '0'), 'live', 'many', sha256(number::text::bytea), '{inference}'
    FROM generate_series(1, :many) AS number
"""
THEIR_LIMITS = """
    INSERT INTO quotas (id, tenant_id, api_key_id, requests_per_minute)
    SELECT gen_random_uuid(), tenant_id, id, 7 FROM api_keys WHERE tenant_id = :tenant AND name = 'many'
"""


async def add_many(tenant: TenantWithGateways, many: int) -> None:
    async with tenant.database.as_operator() as session:
        parameters = {"tenant": tenant.tenant_id, "many": many}
        await session.execute(text(MANY_KEYS), parameters)
        await session.execute(text(THEIR_LIMITS), parameters)


async def test_ended_keys_and_adapters_have_no_limits(database: Database, valkey_url: str) -> None:
    """But those that keys below them share. A key that is in no group counts for no further subject."""
    tenant = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=60)
    async with database.as_operator() as session:
        keys, adapters = KeyRepository(session), RegistryWriter(session, tenant.tenant_id)
        made = [
            (await keys.create(tenant.tenant_id, name, ["inference"])).record
            for name in ("lives", "revoked", "rotated", "expires", "expired")
        ]
        kept, deleted = [await adapters.get_or_create(name) for name in ("kept", "deleted")]
        session.add_all(
            Quota(tenant_id=tenant.tenant_id, api_key_id=key.id, requests_per_minute=5) for key in made
        )
        session.add_all(
            Quota(tenant_id=tenant.tenant_id, adapter_id=each.id, requests_per_minute=4)
            for each in (kept, deleted)
        )
        await session.flush()
        await keys.revoke(tenant.tenant_id, made[1].key_id)
        successor = (await keys.rotate(tenant.tenant_id, made[2].key_id)).record
        for key, ended in ((made[3], "1 hour"), (made[4], "2 days")):
            await session.execute(
                text("UPDATE api_keys SET expires_at = now() - CAST(:ended AS interval) WHERE id = :id"),
                {"id": key.id, "ended": ended},
            )
        await delete_of(session, tenant.tenant_id, "deleted")
    policy = await UsageLedger(database).policy(tenant.tenant_id)
    limits = QuotaLimits(requests_per_minute=5)
    # Clocks differ: an expired key keeps its limits for a day.
    rotated = made[2].id
    assert policy.keys == dict.fromkeys([made[0].id, rotated, successor.id, made[3].id], limits)
    assert policy.roots == {successor.id: rotated}
    of_root, of_successor = (
        policy.subjects(tenant.tenant_id, key_id, kept.id) for key_id in (rotated, successor.id)
    )
    assert [each.level for each in of_root] == ["tenant", "key", "adapter"]
    assert [each.level for each in of_successor] == ["tenant", "group", "key", "adapter"]
    assert of_successor[1].counter == of_root[1].counter and of_successor[1].limits == limits
    assert dict(policy.adapters) == {kept.id: QuotaLimits(requests_per_minute=4)}
    assert policy.tenant == QuotaLimits(requests_per_minute=60)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A server freezes its start-up objects; here a collection visits those of all tests."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_very_many_limits_are_read_without_blocking_others(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    await add_many(tenant, MANY)
    ledger = UsageLedger(database)
    await ledger.policy(tenant.tenant_id)
    # Of this thread, so that a busy machine counts for nothing.
    stalls: list[float] = []

    async def others() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            stalls.append(time.thread_time() - before)

    watching = asyncio.create_task(others())
    policy = await ledger.policy(tenant.tenant_id)
    watching.cancel()
    assert len(policy.keys) == MANY
    assert max(stalls) < 0.05


class Store:
    """A slow database with one policy per epoch."""

    epoch = 1
    reads = 0

    async def load(self, tenant_id: UUID) -> TenantPolicy:
        self.reads += 1
        epoch = self.epoch
        await asyncio.sleep(0.001)
        return TenantPolicy(epoch)


async def test_concurrent_misses_read_a_policy_once() -> None:
    store = Store()
    policies = Policies(store.load)
    await asyncio.gather(*(policies.of(TENANT, 1) for _ in range(20)))
    store.epoch = 2
    await asyncio.gather(*(policies.of(TENANT, 2) for _ in range(20)))
    assert store.reads == 2


async def test_a_caller_of_another_epoch_is_stale() -> None:
    store = Store()
    policies = Policies(store.load)
    store.epoch = 2
    for _ in range(2):
        with pytest.raises(PolicyStale):
            await policies.of(TENANT, 1)
    assert (await policies.of(TENANT, 2)).policy_epoch == 2


async def test_the_least_recently_used_policies_are_dropped() -> None:
    store = Store()
    policies = Policies(store.load, max_tenants=2)
    for number in (1, 2, 1, 3, 1, 2):
        await policies.of(UUID(int=number), 1)
    assert store.reads == 4


async def test_a_policy_in_memory_serves_while_postgresql_is_away_and_no_other_one_does() -> None:
    store, away = Store(), False

    async def bounded(load: Load) -> TenantPolicy:
        if away:
            raise DatabaseUnavailable("away")
        return await load()

    policies = Policies(store.load, bounded=bounded)
    policy = await policies.of(TENANT, 1)
    away = True
    assert await policies.of(TENANT, 1) is policy
    for tenant_id, epoch in ((TENANT, 2), (UUID(int=2), 1)):
        with pytest.raises(DatabaseUnavailable):
            await policies.of(tenant_id, epoch)
    # What a change publishes is read whatever the requests before it have met.
    store.epoch = 2
    assert (await policies.refresh(TENANT)).policy_epoch == 2
    with pytest.raises(PolicyStale):
        await policies.of(TENANT, 1)
    assert store.reads == 2
