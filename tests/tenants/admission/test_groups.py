"""The limits of a key bind the keys that it mints: together they use no more than it may, whatever comes between."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import select, text
from tests.tenants.admission.gateways import (
    SETTINGS,
    TenantWithGateways,
    family,
    found_key,
    limit_key,
    make_tenant_with_gateways,
    mint,
    open_client,
    usage,
)

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys.delegation import KeyDelegation
from loraplex.tenants.api_keys.keys import MAX_DEPTH, AuthenticatedKey, KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import BoundNotHeld, InvalidField, LimitExceeded, RateLimited
from loraplex.tenants.ledger import statements
from loraplex.tenants.models import LIMIT_COLUMNS, ApiKey
from loraplex.tenants.quotas.limits import Subject
from loraplex.tenants.retention import Retention, RetentionRepository

EVENTS = "SELECT level, subject_id, threshold::int, used::int FROM quota_events ORDER BY threshold"


async def spend(gateway: QuotaAdmissionController, tenant: TenantWithGateways, key: AuthenticatedKey) -> None:
    """Reserve and use 30 tokens."""
    reservation = await gateway.admit(tenant.request(10, 20, key))
    await gateway.settle(reservation, usage(reservation, completion=20))


async def refused(
    gateway: QuotaAdmissionController, tenant: TenantWithGateways, key: AuthenticatedKey
) -> tuple[str | None, str | None]:
    with pytest.raises(LimitExceeded) as error:
        await gateway.admit(tenant.request(10, 20, key))
    return error.value.level, error.value.limit


async def again(tenant: TenantWithGateways, *keys: AuthenticatedKey) -> list[AuthenticatedKey]:
    """The keys as their requests find them now."""
    return [await found_key(tenant.database, key.key_id) for key in keys]


async def roots(tenant: TenantWithGateways, *keys: AuthenticatedKey) -> list[UUID | None]:
    async with tenant.database.as_operator() as session:
        found = {id: root for id, root in await session.execute(select(ApiKey.id, ApiKey.limit_root))}
    return [found[key.api_key_id] for key in keys]


async def test_keys_that_mint_one_another_have_two_requests_a_minute_together(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    keys = await family(tenant, MAX_DEPTH, requests_per_minute=2)
    assert await roots(tenant, *keys) == [keys[0].api_key_id] * MAX_DEPTH
    with pytest.raises(InvalidField, match=f"at most {MAX_DEPTH} keys may mint one another"):
        await mint(tenant, keys[-1])
    keys = await again(tenant, *keys)
    async with tenant.gateway() as first, tenant.gateway() as second:
        await first.admit(tenant.request(key=keys[-1]))
        second_one = await second.admit(tenant.request(key=keys[4]))
        assert second_one.rate.requests is not None and second_one.rate.requests.remaining == 0
        assert {(each.level, each.used) for each in second_one.limits} == {("group", 1), ("key", 0)}
        for gateway in (first, second):
            assert await refused(gateway, tenant, keys[0]) == ("key", "requests_per_minute")
            for key in keys[1:]:
                assert await refused(gateway, tenant, key) == ("group", "requests_per_minute")
        asked = tenant.request(key=keys[2])
        with pytest.raises(RateLimited, match="requests_per_minute of the group is 2"):
            await first.admit(asked)
        explained = await second.explain(tenant.tenant_id, asked.request_id)
        assert explained is not None and [each.level for each in explained.decisions if not each.passed] == [
            "group"
        ]


async def test_a_refusal_of_the_group_is_repeated_for_its_other_keys(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child, sibling = await again(tenant, *await family(tenant, 3, requests_per_minute=1))
    async with tenant.gateway() as gateway:
        held = await gateway.admit(tenant.request(key=root))
        recent = gateway._reserver.recent_refusals
        for key in (child, sibling):
            assert await refused(gateway, tenant, key) == ("group", "requests_per_minute")
        epoch = child.policy_epoch or 0
        found = recent.find(tenant.tenant_id, sibling.api_key_id, epoch)
        assert found is not None and found.decision.level == "group"
        assert recent.find(tenant.tenant_id, sibling.api_key_id, epoch + 1) is None
        assert await refused(gateway, tenant, child) == ("group", "requests_per_minute")
        await gateway.cancel(held, refused=True)
        assert recent.find(tenant.tenant_id, sibling.api_key_id, epoch) is None
        await gateway.admit(tenant.request(key=sibling))


async def test_a_limit_given_later_binds_at_once_what_is_there(database: Database, valkey_url: str) -> None:
    """With what the keys below have used and what runs; until the limit goes. Then the next one below is the root of its keys."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    keys = await family(tenant, 3)
    root, child, grandchild = keys
    async with tenant.gateway() as gateway, tenant.gateway() as other:
        await spend(gateway, tenant, child)
        await spend(other, tenant, grandchild)
        running = await other.admit(tenant.request(10, 20, grandchild))
        await limit_key(tenant, root.key_id, tokens_per_day=130)
        assert await roots(tenant, *keys) == [root.api_key_id] * 3
        root, child, grandchild = await again(tenant, *keys)
        await spend(gateway, tenant, child)
        assert await refused(gateway, tenant, grandchild) == ("group", "tokens_per_day")
        assert await refused(other, tenant, root) == ("key", "tokens_per_day")
        assert await use_of(gateway, tenant, root) == (90, 30)
        await other.settle(running, usage(running, completion=20))
        await tenant.shipped()
        assert await use_of(gateway, tenant, root) == (120, 0)
        await tenant.flush()
        assert await refused(other, tenant, child) == ("group", "tokens_per_day")
        assert await use_of(gateway, tenant, root) == (120, 0)

        await limit_key(tenant, child.key_id, tokens_per_day=160)
        assert await roots(tenant, *keys) == [root.api_key_id] * 3
        await limit_key(tenant, root.key_id)
        assert await roots(tenant, *keys) == [None, child.api_key_id, child.api_key_id]
        root, child, grandchild = await again(tenant, *keys)
        await spend(gateway, tenant, grandchild)
        assert await use_of(gateway, tenant, child) == (150, 0)
        assert await refused(other, tenant, grandchild) == ("group", "tokens_per_day")
        await spend(gateway, tenant, root)


async def use_of(
    gateway: QuotaAdmissionController, tenant: TenantWithGateways, key: AuthenticatedKey
) -> tuple[int, int]:
    uses = await gateway.quotas(tenant.tenant_id, [Subject("key", key.api_key_id)])
    return next((each.used, each.reserved) for each in uses if each.name == "tokens_per_day")


async def test_a_key_lifts_no_limit_of_its_group(database: Database, valkey_url: str) -> None:
    """Also one that has no limits of its own, since its root got them later."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await family(tenant, 2)
    (other,) = await family(tenant, 1)
    await limit_key(tenant, root.key_id, requests_per_minute=2)
    none = dict.fromkeys(LIMIT_COLUMNS)
    async with database.as_tenant(tenant.tenant_id) as session:
        keys = KeyDelegation(session, tenant.tenant_id, child.api_key_id)
        for target in (root, child, other):
            assert await keys.limits_for(target.key_id, none) == none | {"requests_per_minute": 2}
            with pytest.raises(BoundNotHeld, match="requests_per_minute must be at most"):
                await keys.limits_for(target.key_id, none | {"requests_per_minute": 3})
        with pytest.raises(BoundNotHeld):
            await keys.rotate(other.key_id, 0)


async def test_a_limit_of_sessions_alone_makes_a_group(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await family(tenant, 2)
    await limit_key(tenant, root.key_id, tokens_per_session=30)
    async with tenant.gateway() as gateway:
        for key in await again(tenant, root, child):
            request = replace(tenant.request(key=key), session="ses_1")
            if key.key_id == root.key_id:
                await gateway.admit(request)
            else:
                with pytest.raises(LimitExceeded) as error:
                    await gateway.admit(request)
                assert (error.value.level, error.value.limit) == ("group", "tokens_per_session")
    assert await roots(tenant, root, child) == [root.api_key_id] * 2
    await limit_key(tenant, root.key_id)
    assert await roots(tenant, root, child) == [None, None]


async def test_a_root_binds_once_it_is_revoked_and_is_kept(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await family(tenant, 2, tokens_per_day=50)
    await limit_key(tenant, child.key_id)
    async with tenant.gateway() as gateway:
        await spend(gateway, tenant, (await again(tenant, root))[0])
        async with database.as_operator() as session:
            await KeyRepository(session).revoke(tenant.tenant_id, root.key_id)
            await session.execute(
                text("UPDATE api_keys SET expires_at = now() - interval '40 days' WHERE id = :id"),
                {"id": root.api_key_id},
            )
            sweep = RetentionRepository(
                session, Retention(audit=timedelta(days=30), quota_events=timedelta(30))
            )
            assert (await sweep.sweep(100))["api_keys"] == 0
        (child,) = await again(tenant, child)
        assert await refused(gateway, tenant, child) == ("group", "tokens_per_day")
        await tenant.flush()
        assert await refused(gateway, tenant, child) == ("group", "tokens_per_day")


async def test_a_rotated_key_goes_on_with_what_is_left(database: Database, valkey_url: str) -> None:
    """And its limits, when they change, bind what the old one minted; a row of keys does not get longer."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await family(tenant, 2, tokens_per_day=70)
    async with tenant.gateway() as gateway:
        await spend(gateway, tenant, (await again(tenant, root))[0])
        newest = root.key_id
        for _ in range(MAX_DEPTH):
            async with database.as_operator() as session:
                newest = (await KeyRepository(session).rotate(tenant.tenant_id, newest, 60)).record.key_id
        rotated, child = await again(tenant, await found_key(database, newest), child)
        await spend(gateway, tenant, child)
        assert await refused(gateway, tenant, rotated) == ("group", "tokens_per_day")
        await limit_key(tenant, newest, tokens_per_day=100)
        minted = await mint(tenant, rotated)
        rotated, minted_key = await again(tenant, rotated, await found_key(database, minted.key_id))
        assert await roots(tenant, rotated, minted_key) == [root.api_key_id] * 2
        await spend(gateway, tenant, minted_key)
        assert await refused(gateway, tenant, rotated) == ("group", "tokens_per_day")


async def test_no_key_is_minted_beside_a_limit(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    for _ in range(8):
        (parent,) = await family(tenant, 1)
        steps = [
            mint(tenant, parent),
            limit_key(tenant, parent.key_id, requests_per_minute=1),
            mint(tenant, parent),
        ]
        first, _, second = await asyncio.gather(*steps)
        assert first is not None and second is not None
        children = await again(tenant, *[await found_key(database, each.key_id) for each in (first, second)])
        assert await roots(tenant, parent, *children) == [parent.api_key_id] * 3


async def test_a_threshold_of_a_group_is_crossed_once_by_all(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    keys = await again(tenant, *await family(tenant, 4, tokens_per_day=120))
    async with tenant.gateway() as first, tenant.gateway() as second:
        for key in keys[:3]:
            await spend(first, tenant, key)
        await tenant.shipped()
        assert await tenant.rows(EVENTS) == []
        await spend(second, tenant, keys[3])
        await tenant.shipped()
        of_root = {"level": "key", "subject_id": keys[0].api_key_id, "used": 120}
        assert await tenant.rows(EVENTS) == [of_root | {"threshold": 80}, of_root | {"threshold": 100}]


async def test_what_is_settled_stands_where_a_groups_thresholds_cannot_be_tested(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next settlement finds them."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await again(tenant, *await family(tenant, 2, tokens_per_day=70))
    async with tenant.gateway() as gateway:
        with monkeypatch.context() as patched:
            patched.setattr(
                statements, "CROSSED_BY_GROUPS", "SELECT 1 / cardinality(%s::uuid[]) / 0, %s::text[]"
            )
            await spend(gateway, tenant, child)
            await spend(gateway, tenant, child)
            await tenant.shipped()
        assert await tenant.rows("SELECT count(*)::int AS n FROM usage_records") == [{"n": 2}]
        assert root.api_key_id not in [row["subject_id"] for row in await tenant.rows(EVENTS)]
        reservation = await gateway.admit(tenant.request(10, 0, child))
        await gateway.settle(reservation, usage(reservation, completion=0))
        await tenant.shipped()
        events = await tenant.rows(EVENTS)
        assert [row["used"] for row in events if row["subject_id"] == root.api_key_id] == [70, 70]


async def test_without_valkey_a_group_has_the_share_of_its_root(database: Database, valkey_url: str) -> None:
    """And its counters learn what they did not admit."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child, grandchild = await again(tenant, *await family(tenant, 3, requests_per_minute=3))
    async with tenant.gateway() as gateway:
        await spend(gateway, tenant, grandchild)
        await tenant.shipped()
        gateway.maintenance.breaker.is_open = True
        of_share = [await gateway.admit(tenant.request(10, 20, key)) for key in (root, child, child)]
        assert all(each.degraded for each in of_share)
        assert await refused(gateway, tenant, grandchild) == ("group", "requests_per_minute")
        assert await refused(gateway, tenant, root) == ("key", "requests_per_minute")
        gateway.maintenance.breaker.close()
        for reservation in of_share:
            await gateway.settle(reservation, usage(reservation, completion=20))
        await tenant.shipped()
        assert await use_of(gateway, tenant, root) == (120, 0)
        assert await use_of(gateway, tenant, child) == (60, 0)


async def test_what_a_dead_gateway_left_of_a_group_is_given_back(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await again(tenant, *await family(tenant, 2, tokens_per_day=60))
    now = [1000.0]
    async with tenant.gateway(clock=lambda: now[0]) as living:
        async with tenant.gateway(killed=True) as doomed:
            await doomed.admit(tenant.request(10, 20, child))
            await doomed.admit(tenant.request(10, 20, root))
            await doomed.maintenance.shipping.ship()
        assert await use_of(living, tenant, root) == (0, 60)
        assert await refused(living, tenant, child) == ("group", "tokens_per_day")
        await living.maintenance.heartbeat()
        await tenant.let_leases_run_out()
        await living.maintenance.reaper.reap()
        now[0] += SETTINGS.lease_s
        assert await living.maintenance.reaper.reap() == 2
        assert await use_of(living, tenant, root) == (0, 0)
        await spend(living, tenant, child)


async def test_a_lease_that_valkey_lost_is_recreated_for_the_group(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    root, child = await again(tenant, *await family(tenant, 2, tokens_per_day=60))
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        await gateway.admit(tenant.request(10, 20, child))
        for name in ("open", f"use:key:{root.api_key_id}:*", "leases:*"):
            async for key in client.scan_iter(f"loraplex:{{{tenant.tenant_id}}}:1:{name}"):
                await client.delete(key)
        assert await use_of(gateway, tenant, root) == (0, 0)
        await gateway.maintenance.heartbeat()
        assert await use_of(gateway, tenant, root) == (0, 30)
