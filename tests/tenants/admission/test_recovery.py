"""A gateway is killed: the next one on its data directory ships what the journal has, once, before it serves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.tenants.admission.gateways import (
    PRICE,
    TenantWithGateways,
    all_shipped,
    check_ledger,
    make_tenant_with_gateways,
    usage,
)

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recovery import ship_left_behind
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import SettledUsage

MAX_BYTES = 64 << 20


@asynccontextmanager
async def doomed(tenant: TenantWithGateways, folder: Path) -> AsyncIterator[QuotaAdmissionController]:
    """A gateway with a journal on the disk, which is gone at the end without having shipped more."""
    journal = await Journal.open(folder, uuid4(), max_bytes=MAX_BYTES)
    async with tenant.gateway(journal=journal, killed=True) as gateway:
        yield gateway
    await journal.close()


async def recover(tenant: TenantWithGateways, folder: Path, gateway: QuotaAdmissionController) -> None:
    tenants = await ship_left_behind(tenant.database, folder, max_bytes=MAX_BYTES, lease_s=45.0)
    assert tenants == {tenant.tenant_id}
    gateway.rebuild_later(tenants)
    await gateway.maintenance.retry()


@pytest.mark.parametrize("flushed", [False, True], ids=["", "and Valkey"])
async def test_what_a_killed_gateway_had_is_in_the_ledger_once(
    database: Database, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with doomed(tenant, tmp_path) as gateway:
        shipped, ended, running, silent = [await gateway.admit(tenant.request()) for _ in range(4)]
        await gateway.settle(shipped, usage(shipped))
        await all_shipped(gateway)
        for step in ("reserve", "settle"):
            monkeypatch.setattr(UsageLedger, step, unavailable)
        late = await gateway.admit(tenant.request())
        for each in (ended, late):
            await gateway.settle(each, usage(each))
        gateway.follow(running, lambda: SettledUsage(outcome=None, prompt_tokens=10, completion_tokens=3))
        await gateway.maintenance.record_progress()
    monkeypatch.undo()
    assert len(await tenant.rows("SELECT id FROM reservations")) == 3
    if flushed:
        await tenant.flush()
    async with tenant.gateway() as gateway:
        await recover(tenant, tmp_path, gateway)
        assert await check_ledger(tenant, gateway) == (3 * 15 + 13, 5)
        rows = await tenant.rows(
            "SELECT id, uncached_tokens, completion_tokens, amount_pico FROM usage_records WHERE outcome = 'unknown' ORDER BY id"
        )
        assert [(row["id"], row["uncached_tokens"], row["completion_tokens"]) for row in rows] == [
            (running.id, 10, 3),
            (silent.id, 0, 0),
        ]
        assert rows[0]["amount_pico"] == PRICE.amount_pico(10, 0, 3)
        assert [*tmp_path.glob("*.sqlite")] == []
        await gateway.cancel(await gateway.admit(tenant.request()))
        gateways = await tenant.rows("SELECT id FROM gateways")
        assert len(gateways) == 1, "no fence waits for the dead one"


async def test_recovery_that_is_interrupted_is_repeated(
    database: Database, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with doomed(tenant, tmp_path) as gateway:
        ended, _ = [await gateway.admit(tenant.request()) for _ in range(2)]
        monkeypatch.setattr(UsageLedger, "settle", unavailable)
        await gateway.settle(ended, usage(ended))
        with pytest.raises(DatabaseUnavailable):
            await gateway.maintenance.shipping.ship()
    with pytest.raises(DatabaseUnavailable):
        await ship_left_behind(database, tmp_path, max_bytes=MAX_BYTES, lease_s=45.0)
    monkeypatch.undo()
    async with tenant.gateway() as gateway:
        await recover(tenant, tmp_path, gateway)
        assert await check_ledger(tenant, gateway) == (15, 2)


async def unavailable(*_: Any) -> Any:
    raise DatabaseUnavailable("away")
