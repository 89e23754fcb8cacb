"""A fence is confirmed once a journal is shipped: whoever waits for it sees every open request, or is refused."""

from dataclasses import replace
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

from loraplex.tenants.admission.fences import ship_everywhere
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, QuotaUnavailable
from loraplex.tenants.ledger import shipping

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
        monkeypatch.setattr(other.maintenance.fences, "_settings", LASTING)
        await other.maintenance.settlements._counter_rebuild.rebuild(tenant.tenant_id)
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
