"""Gateways at a Valkey whose clock was an hour ahead and is right again."""

from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from tests.tenants.admission.gateways import check_ledger, make_tenant_with_gateways, usage
from tests.tenants.counters.server_clock import set_server_clock

from loraplex.tenants.database import Database
from loraplex.tenants.errors import RateLimited

HOUR: Final = timedelta(hours=1)


async def test_requests_go_on_under_the_right_time_and_no_limit_is_exceeded(
    database: Database, valkey_url: str
) -> None:
    """What was admitted and what ended while the clock was ahead is counted once, and so is what is open meanwhile."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_month=105)
    now = datetime.now(UTC)
    # Both times are of today.
    now -= HOUR if now.hour == 23 else timedelta()
    async with tenant.gateway() as first, tenant.gateway() as second:
        for gateway in (first, second):
            set_server_clock(gateway.counters, now + HOUR)
        ended, running = [await gateway.admit(tenant.request()) for gateway in (first, second)]
        await first.settle(ended, usage(ended))
        for gateway in (first, second):
            set_server_clock(gateway.counters, now)
        last = await first.admit(tenant.request())
        assert (ended.epoch, running.epoch, last.epoch) == (1, 1, 2)
        assert last.admitted_at == now
        with pytest.raises(RateLimited):
            await second.admit(tenant.request(10, 21))
        await second.settle(running, usage(running))
        await first.settle(last, usage(last))
        await tenant.shipped()
        for gateway in (first, second):
            await gateway.maintenance.reconciliation.reconcile()
            assert gateway.reconciliation.rebuilt == 0
        assert await check_ledger(tenant, first) == (45, 3)


async def test_a_rate_is_back_after_a_minute(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=2)
    now = datetime.now(UTC)
    async with tenant.gateway() as gateway:
        set_server_clock(gateway.counters, now + HOUR)
        await gateway.cancel(await gateway.admit(tenant.request()))
        set_server_clock(gateway.counters, now)
        with pytest.raises(RateLimited) as refused:
            await gateway.admit(tenant.request())
        assert refused.value.retry_after_s == 30
        set_server_clock(gateway.counters, now + timedelta(minutes=1))
        for _ in range(2):
            await gateway.cancel(await gateway.admit(tenant.request()))
