"""Compares the quota counters of a tenant with the ledger after a fault.

Invariant: it only reads. Counters that were lost and not rebuilt are a difference, too.
"""

import asyncio
import time
from typing import Final
from uuid import UUID

from loraplex.platform.drills.report import Promise
from loraplex.tenants.admission.counter_drift import compare_counters, opened_counters
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger

POLL_S: Final = 0.5
NAME: Final = "quota counters agree with the ledger, and nothing stays reserved"


async def check_quotas(database: Database, redis_url: str, tenant_id: UUID, timeout_s: float) -> Promise:
    """Compare until they agree and no reservation is open, at most `timeout_s` seconds: leases of a killed gateway end late."""
    deadline = time.monotonic() + timeout_s
    async with opened_counters(database, redis_url) as (ledger, counters):
        while True:
            try:
                found = await _difference(ledger, counters, tenant_id)
            except StoreUnavailable as error:
                found = str(error)
            if found is None:
                return Promise(NAME, True, "exact")
            if time.monotonic() >= deadline:
                return Promise(NAME, False, found)
            await asyncio.sleep(POLL_S)


async def _difference(ledger: UsageLedger, counters: Counters, tenant_id: UUID) -> str | None:
    """What is wrong with the counters now; None if nothing is."""
    counted = await counters.settled(tenant_id)
    if counted is None:
        return "the counters are lost"
    if counted.open:
        return f"{len(counted.open)} requests are still reserved"
    drift = await compare_counters(ledger, tenant_id, counted)
    if drift is None:
        return None
    behind = ", ".join(
        f"{use.period}: {use.tokens:+d} tokens, {use.amount_nano:+d} nano-units" for use in drift.behind
    )
    return f"the ledger less the counters of epoch {counted.epoch}: {behind}"
