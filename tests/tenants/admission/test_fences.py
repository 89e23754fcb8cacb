"""A fence is confirmed once a journal is shipped: whoever waits for it sees every open request, or is refused. It brings every
gateway whose running requests end.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.tenants.admission.gateways import (
    SETTINGS,
    TenantWithGateways,
    check_ledger,
    make_tenant_with_gateways,
    usage,
    used,
)
from tests.tenants.registry_records import RegistryWriter
from tests.tenants.suspension import resume, suspend

from loraplex.tenants import running_requests
from loraplex.tenants.admission import fences
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.fences import ship_everywhere
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PolicyStale, QuotaUnavailable
from loraplex.tenants.ledger import shipping
from loraplex.tenants.ledger.usage_ledger import Ended

QUICK = replace(SETTINGS, fence_s=0.5)
LASTING = replace(SETTINGS, fence_s=60.0)


async def unavailable(*_: Any) -> Any:
    raise DatabaseUnavailable("away")


async def silence(tenant: TenantWithGateways) -> None:
    """As if PostgreSQL had not seen the gateways that have not confirmed the newest fence for an hour."""
    await tenant.rows(
        "UPDATE gateways SET seen_at = now() - interval '1 hour' WHERE fence < (SELECT max(fence) FROM gateways)"
    )


async def test_open_requests_are_in_the_ledger_once_every_gateway_has_shipped(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        reserve = gateway.maintenance.ledger.reserve
        monkeypatch.setattr(gateway.maintenance.ledger, "reserve", unavailable)
        reservation = await gateway.admit(tenant.request())
        with pytest.raises(QuotaUnavailable):
            await ship_everywhere(database, tenant.tenant_id, QUICK)
        assert await tenant.rows("SELECT id FROM reservations") == []
        monkeypatch.setattr(gateway.maintenance.ledger, "reserve", reserve)
        await ship_everywhere(database, tenant.tenant_id)
        assert await tenant.rows("SELECT id FROM reservations") == [{"id": reservation.id}]
        assert (await gateway.admit(tenant.request())).epoch == reservation.epoch, "it outdates no counters"


async def test_counters_are_not_rebuilt_without_what_another_gateway_has_not_shipped(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No fence waits for the next batch in the background.
    monkeypatch.setattr(shipping, "PAUSE_S", 3600.0)
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=60)
    async with tenant.gateway() as slow, tenant.gateway(QUICK) as other:
        await other.cancel(await other.admit(tenant.request()))
        reserve = slow.maintenance.ledger.reserve
        monkeypatch.setattr(slow.maintenance.ledger, "reserve", unavailable)
        reservation = await slow.admit(tenant.request())
        await tenant.flush()
        with pytest.raises(QuotaUnavailable):
            await other.admit(tenant.request())
        monkeypatch.setattr(slow.maintenance.ledger, "reserve", reserve)
        monkeypatch.setattr(other.maintenance.fences, "settings", LASTING)
        await other.maintenance.settlements.counter_rebuild.rebuild(tenant.tenant_id)
        assert (await used(other, tenant.tenant_id))["tokens_per_day"].reserved == 30
        await slow.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, slow) == (15, 1)


async def test_a_silent_gateway_is_dead_unless_postgresql_was_away_lately(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as silent, tenant.gateway(QUICK) as other:
        for each in (other, silent):
            await each.cancel(await each.admit(tenant.request()))
        await tenant.shipped()
        monkeypatch.setattr(silent.maintenance.ledger, "confirm_fence", unavailable)
        fences = other.maintenance.fences
        with pytest.raises(QuotaUnavailable):
            await fences.raise_fence(tenant.tenant_id)
        await silence(tenant)
        with pytest.raises(QuotaUnavailable):
            await fences.raise_fence(tenant.tenant_id)
        monkeypatch.setattr(fences, "_connected_since", -1e9)
        await fences.raise_fence(tenant.tenant_id)


def heard(gateway: QuotaAdmissionController) -> list[Ended]:
    """What the gateway learns of from now on."""
    found = list[Ended]()
    gateway.on_ended = found.append
    return found


def all_have(known: list[list[Ended]], number: int) -> bool:
    return all(len(each) == number for each in known)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_every_gateway_learns_once_what_ended_and_a_new_one_nothing(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    tenant_id, key_id = tenant.tenant_id, tenant.key.api_key_id
    async with database.as_operator() as session:
        adapters = RegistryWriter(session, tenant_id)
        adapter = await adapters.create("poet")
        for digit in "abc":
            await adapters.add_version("poet", digest=digit * 64, size_bytes=1, rank=8, config={}, report={})
    async with tenant.gateway() as first, tenant.gateway() as second:
        known = [heard(first), heard(second)]
        for gateway in (first, second):
            await gateway.maintenance.fences.ready()
        ends: list[tuple[dict[str, Any], Ended]] = [
            ({"api_key_id": key_id}, Ended(tenant_id, key_ids=frozenset({key_id}))),
            (
                {"adapter_id": adapter.id, "version": 2},
                Ended(tenant_id, versions=frozenset({(adapter.id, 2)})),
            ),
            (
                {"adapter_id": adapter.id},
                Ended(tenant_id, versions=frozenset((adapter.id, version) for version in (1, 2, 3))),
            ),
        ]
        for number, (subject, _) in enumerate(ends, 1):
            async with database.as_tenant(tenant_id) as session:
                assert await running_requests.end(session, tenant_id, **subject)
            await until(partial(all_have, known, number))
        assert known == [[ended for _, ended in ends]] * 2
        async with tenant.gateway() as third:
            late = heard(third)
            await third.cancel(await third.admit(tenant.request()))
            assert late == []


async def test_a_gateway_without_postgresql_learns_it_at_its_return(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    key_ids = [tenant.key.api_key_id]
    async with database.as_operator() as session:
        issued = await KeyRepository(session).create(tenant.tenant_id, "second", ["inference"])
        key_ids.append(issued.record.id)
    async with tenant.gateway() as gateway:
        found, read = heard(gateway), gateway.maintenance.ledger.fences
        await gateway.maintenance.fences.ready()
        monkeypatch.setattr(gateway.maintenance.ledger, "fences", unavailable)
        for key_id in key_ids:
            async with database.as_operator() as session:
                await running_requests.end(session, tenant.tenant_id, api_key_id=key_id)
        await asyncio.sleep(0.1)
        assert found == []
        monkeypatch.setattr(gateway.maintenance.ledger, "fences", read)
        await until(lambda: bool(found))
        assert found == [Ended(tenant.tenant_id, key_ids=frozenset(key_ids))]


async def test_a_tenant_ends_once_and_callers_read_before_are_read_again(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        found = heard(gateway)
        await gateway.cancel(await gateway.admit(tenant.request()))
        async with database.as_operator() as session:
            suspended = await suspend(session, tenant.key.tenant_name or "")
            assert [await running_requests.end(session, tenant.tenant_id) for _ in range(2)] == [True, False]
        await until(lambda: bool(found))
        assert found[0] == Ended(tenant.tenant_id, suspended.policy_epoch)
        assert suspended.policy_epoch > (tenant.key.policy_epoch or 0)
        # Nobody has published the new policy.
        with pytest.raises(PolicyStale, match="ended"):
            await gateway.admit(tenant.request())
        async with database.as_operator() as session:
            await resume(session, tenant.key.tenant_name or "")
        fresh = await tenant.fresh_key()
        reservation = await gateway.admit(tenant.request(key=fresh))
        assert (fresh.policy_epoch or 0) > found[0].policy_epoch
        await gateway.cancel(reservation)


async def test_a_fence_that_takes_long_to_confirm_delays_no_end(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        found = heard(gateway)
        await gateway.maintenance.fences.ready()
        monkeypatch.setattr(fences, "READ_AGAIN_SECONDS", 0.05)
        monkeypatch.setattr(gateway.maintenance.fences, "ship", lambda: asyncio.sleep(1.5))
        for _ in range(2):
            async with database.as_operator() as session:
                await running_requests.end(session, tenant.tenant_id, api_key_id=tenant.key.api_key_id)
            began = asyncio.get_running_loop().time()
            await until(lambda: bool(found))
            assert asyncio.get_running_loop().time() - began < 1.4
            found.clear()
