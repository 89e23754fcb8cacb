"""A correction takes back a request's tokens and amount, once, in rows, rollups, totals and counters."""

import asyncio
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from tests.tenants.admission.gateways import make_tenant_with_gateways, used
from tests.tenants.admission.gateways import usage as used_by
from tests.tenants.ledger.settled_rows import ROLLUPS, read, reservation, usage
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import AlreadyCorrected, InvalidField, RequestNotFound
from loraplex.tenants.ledger.corrections import MAX_REASON, UsageCorrections
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import UsageRecord

SUMS = """
    SELECT sum(uncached_tokens)::bigint, sum(cached_tokens)::bigint, sum(completion_tokens)::bigint, sum(amount_pico)::bigint,
        sum(reasoning_tokens)::bigint
    FROM usage_records
"""
TOTALS = "SELECT DISTINCT requests, tokens, amount_nano FROM usage_totals"


async def reverse(database: Database, record_id: UUID, reason: str = "the engine was broken") -> UsageRecord:
    async with database.as_operator() as session:
        return await UsageCorrections(session).reverse(record_id, reason)


async def test_a_correction_takes_back_one_request_and_leaves_the_others(database: Database) -> None:
    tenant_id, ledger = await make_tenant(database), UsageLedger(database)
    kept, wrong = reservation(tenant_id), reservation(tenant_id)
    await ledger.settle(kept, usage(amount=1001, reasoning=3))
    sums, totals = await read(database, SUMS), await read(database, TOTALS)
    rollups = await read(database, ROLLUPS)
    used = usage(prompt=70, cached=9, completion=11, amount=2_000_001, reasoning=8)
    await ledger.settle(wrong, replace(used, system_fingerprint="fp_1"))
    await ledger.close()
    statuses = await read(database, "SELECT status, requests FROM request_rollups")
    correction = await reverse(database, wrong.id, " the engine was broken ")
    assert (correction.kind, correction.reverses_id) == ("correction", wrong.id)
    assert (correction.reason, correction.amount_pico) == ("the engine was broken", -2_000_001)
    assert (correction.admitted_at, correction.day) == (wrong.admitted_at, wrong.day)
    assert correction.system_fingerprint == "fp_1"
    assert correction.id.bytes[:6] == wrong.id.bytes[:6], "it is in the partition of what it reverses"
    assert await read(database, SUMS) == sums
    # The request itself has taken place: it counts, with nothing.
    assert await read(database, TOTALS) == [(2, *totals[0][1:])]
    assert await read(database, ROLLUPS) == [(*row[:6], 2, *row[7:]) for row in rollups]
    assert await read(database, "SELECT status, requests FROM request_rollups") == statuses


async def test_a_request_is_corrected_once_also_by_two_operators(database: Database) -> None:
    tenant_id, ledger = await make_tenant(database), UsageLedger(database)
    wrong = reservation(tenant_id)
    await ledger.settle(wrong, usage())
    await ledger.close()
    results = await asyncio.gather(*(reverse(database, wrong.id) for _ in range(3)), return_exceptions=True)
    (correction,) = [each for each in results if isinstance(each, UsageRecord)]
    assert [type(each) for each in results].count(AlreadyCorrected) == 2
    for unknown in (uuid4(), correction.id):
        with pytest.raises(RequestNotFound):
            await reverse(database, unknown)
    for reason in ("", "  ", "x" * (MAX_REASON + 1)):
        with pytest.raises(InvalidField, match="1 to 500"):
            await reverse(database, wrong.id, reason)
    assert await read(database, SUMS) == [(0, 0, 0, 0, 0)]


async def test_the_counters_follow_a_correction(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        for _ in range(2):
            last = await gateway.admit(tenant.request())
            await gateway.settle(last, used_by(last))
        running = await gateway.admit(tenant.request())
        await tenant.shipped()
        await reverse(database, last.id)
        await gateway.recount(tenant.tenant_id)
        found = (await used(gateway, tenant.tenant_id))["tokens_per_day"]
        assert (found.used, found.reserved) == (15, 30)
        gateway.maintenance.requests.active[tenant.tenant_id] = None
        for _ in range(3):
            await gateway.maintenance.reconciliation.reconcile()
        assert gateway.reconciliation.rebuilt == 0, "reconciliation finds no difference"
        await gateway.settle(running, replace(used_by(running), completion_tokens=0))
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].used == 25
