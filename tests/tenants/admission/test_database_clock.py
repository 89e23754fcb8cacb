"""PostgreSQL's clock jumps an hour ahead: all leases seem to have expired, and all gateways seem dead, until they are seen again."""

from dataclasses import replace

import pytest
from tests.tenants.admission.gateways import (
    SETTINGS,
    all_shipped,
    check_ledger,
    make_tenant_with_gateways,
    usage,
)

from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, QuotaUnavailable
from loraplex.tenants.ledger import statements

NOW, IN_AN_HOUR = "now()", "(now() + interval '1 hour')"


def jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set PostgreSQL's clock an hour ahead, for all statements of the ledger."""
    for name, statement in vars(statements).items():
        if isinstance(statement, str) and NOW in statement:
            monkeypatch.setattr(statements, name, statement.replace(NOW, IN_AN_HOUR))


async def test_requests_of_living_gateways_are_not_given_up(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be missing in a rebuild, which could then admit what they use once more."""
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=60), [0.0]
    async with (
        tenant.gateway() as living,
        tenant.gateway() as dead,
        tenant.gateway(clock=lambda: now[0]) as other,
    ):
        running, lost = [await gateway.admit(tenant.request()) for gateway in (living, dead)]
        await tenant.shipped()
        dead.maintenance.requests.running.clear()
        await other.maintenance.heartbeat()
        now[0] += SETTINGS.lease_s
        await other.maintenance.heartbeat()
        jump(monkeypatch)
        assert await other.maintenance.reaper.reap() == 0
        await living.maintenance.heartbeat()
        for _ in range(5):
            now[0] += SETTINGS.heartbeat_s
            await other.maintenance.heartbeat()
        assert await other.maintenance.reaper.reap() == 1
        assert await tenant.rows("SELECT id FROM reservations") == [{"id": running.id}] != [{"id": lost.id}]
        await other.recount(tenant.tenant_id)
        await living.settle(running, usage(running))
        await tenant.let_leases_run_out()
        await other.maintenance.reaper.reap()
        assert await check_ledger(tenant, other) == (15, 1)


async def test_a_gateway_that_cannot_ship_its_journal_gives_up_requests_of_others(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads PostgreSQL's time with the fences, and confirms none of them."""
    tenant, now = await make_tenant_with_gateways(database, valkey_url), [0.0]
    async with tenant.gateway() as dead, tenant.gateway(clock=lambda: now[0]) as other:
        await dead.admit(tenant.request())
        await tenant.shipped()
        dead.maintenance.requests.running.clear()
        await other.maintenance.heartbeat()

        async def unavailable(*_: object) -> None:
            raise DatabaseUnavailable("away")

        monkeypatch.setattr(other.maintenance.ledger, "reserve", unavailable)
        await other.admit(tenant.request())
        await other.maintenance.ledger.raise_fence(tenant.tenant_id, outdates=False)
        await tenant.let_leases_run_out()
        now[0] += SETTINGS.lease_s
        await other.maintenance.heartbeat()
        assert await other.maintenance.reaper.reap() == 1


async def test_a_rebuild_waits_for_gateways_that_only_seem_dead(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=60), [0.0]
    quick = replace(SETTINGS, fence_s=0.5)
    async with tenant.gateway() as slow, tenant.gateway(quick, clock=lambda: now[0]) as other:
        for _ in range(4):
            await other.maintenance.fences.poll()
            now[0] += 9.0

        async def unavailable(*_: object) -> None:
            raise DatabaseUnavailable("away")

        monkeypatch.setattr(slow.maintenance.ledger, "reserve", unavailable)
        reservation = await slow.admit(tenant.request())
        await tenant.flush()
        jump(monkeypatch)
        with pytest.raises(QuotaUnavailable):
            await other.admit(tenant.request())
        monkeypatch.undo()
        await all_shipped(slow)
        await slow.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, slow) == (15, 1)


def test_gateways_that_were_not_seen_once_keep_their_share() -> None:
    limiter = LocalLimiter()
    shares = []
    for live in (3, 1, 3, 2, 2):
        limiter.count_gateways(live)
        shares.append(limiter.share(60))
    assert shares == [20, 20, 20, 20, 30]
