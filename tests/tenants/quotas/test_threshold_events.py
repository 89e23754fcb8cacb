"""Crossing 80 and 100 percent of a day's or month's limit is reported once, however many requests cross at once."""

import asyncio
from dataclasses import replace

from sqlalchemy import select
from tests.tenants.admission.gateways import (
    TenantWithGateways,
    check_ledger,
    make_tenant_with_gateways,
    set_limits,
    usage,
)
from tests.tenants.registry_records import RegistryWriter, add

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.database import Database
from loraplex.tenants.models import Adapter, Quota

EVENTS = """
    SELECT limit_name, threshold::int, used::int, limit_value::int FROM quota_events WHERE level = 'tenant'
    ORDER BY limit_name, threshold
"""


async def use_twenty_tokens(tenant: TenantWithGateways, gateway: QuotaAdmissionController) -> None:
    reservation = await gateway.admit(tenant.request(10, 10))
    await gateway.settle(reservation, usage(reservation, completion=10))


async def events(tenant: TenantWithGateways) -> list[tuple[str, int]]:
    await tenant.shipped()
    return [(row["limit_name"], row["threshold"]) for row in await tenant.rows(EVENTS)]


async def test_each_threshold_is_reported_once(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(
        database, valkey_url, tokens_per_day=160, tokens_per_month=1000, budget_per_month=1
    )
    async with tenant.gateway() as first, tenant.gateway() as second:
        await asyncio.gather(*(use_twenty_tokens(tenant, first) for _ in range(6)))
        assert await events(tenant) == []
        await asyncio.gather(*(use_twenty_tokens(tenant, gateway) for gateway in (first, second)))
        assert await events(tenant) == [
            ("budget_per_month", 80),
            ("tokens_per_day", 80),
            ("tokens_per_day", 100),
        ]
        budget, eighty, hundred = [row["used"] for row in await tenant.rows(EVENTS)]
        assert (budget, hundred) == (1, 160)
        assert eighty in (140, 160), "both may be in one statement"
        assert await check_ledger(tenant, first) == (160, 8)


async def test_a_lowered_limit_is_crossed_by_the_next_use(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request(10, 10))
        await set_limits(tenant, tokens_per_day=20)
        await gateway.settle(reservation, usage(reservation, completion=10))
        await tenant.shipped()
        assert await events(tenant) == [("tokens_per_day", 80), ("tokens_per_day", 100)]


async def test_a_key_and_an_adapter_have_thresholds_of_their_own(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with database.as_tenant(tenant.tenant_id) as session:
        await add(RegistryWriter(session, tenant.tenant_id), 1)
        adapter_id = await session.scalar(select(Adapter.id))
        session.add(Quota(tenant_id=tenant.tenant_id, api_key_id=tenant.key.api_key_id, tokens_per_month=18))
        session.add(Quota(tenant_id=tenant.tenant_id, adapter_id=adapter_id, tokens_per_day=15))
    key = await tenant.fresh_key()
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(replace(tenant.request(5, 10, key=key), adapter_id=adapter_id))
        await gateway.settle(reservation, usage(reservation, completion=5))
        await tenant.shipped()
    rows = await tenant.rows(
        "SELECT level, subject_id, limit_name, threshold FROM quota_events ORDER BY 1, 4"
    )
    assert [tuple(row.values()) for row in rows] == [
        ("adapter", adapter_id, "tokens_per_day", 80),
        ("adapter", adapter_id, "tokens_per_day", 100),
        ("key", tenant.key.api_key_id, "tokens_per_month", 80),
    ]
