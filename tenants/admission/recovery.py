"""Ships the journals that gateways on this data directory left behind, before this gateway serves.

Invariant: a request that ended is in the ledger once; one that was open has the outcome `unknown` and what its last progress
says. Recovery may be interrupted anywhere and repeated.
"""

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import structlog

from loraplex.tenants.database import Database
from loraplex.tenants.ledger.journal.commits import JournalRecorder
from loraplex.tenants.ledger.journal.journal import NO_RECORDER, Journal, left_behind
from loraplex.tenants.ledger.shipping import Shipping
from loraplex.tenants.ledger.usage_ledger import UsageLedger

LOG = structlog.get_logger("loraplex.recovery")


async def ship_left_behind(
    database: Database,
    folder: Path,
    *,
    max_bytes: int,
    lease_s: float,
    recorder: JournalRecorder = NO_RECORDER,
) -> set[UUID]:
    """Ship all journals in `folder` whose gateway is gone, and remove these gateways. Return the tenants of their requests,
    whose counters must be rebuilt.

    Raises `DatabaseUnavailable`, `JournalUnavailable`.
    """
    tenants, ledger = set[UUID](), UsageLedger(database)
    try:
        async for journal in left_behind(folder, max_bytes=max_bytes, recorder=recorder):
            try:
                tenants |= await _ship(journal, ledger, lease_s)
            finally:
                await journal.close()
    finally:
        await ledger.close()
    return tenants


async def _ship(journal: Journal, ledger: UsageLedger, lease_s: float) -> set[UUID]:
    tenants = set[UUID]()
    open_requests = await journal.open_requests()
    for each in open_requests:
        await journal.end(each.reservation.id, replace(each.usage, outcome="unknown"))
    shipping = Shipping(
        journal,
        ledger,
        journal.gateway_id,
        lease_s,
        lambda ends: tenants.update(each.ended.reservation.tenant_id for each in ends),
        lambda _: None,
    )
    await shipping.ship()
    await ledger.remove_gateway(journal.gateway_id)
    LOG.warning(
        "a journal that was left behind is shipped",
        gateway=str(journal.gateway_id),
        unknown=len(open_requests),
    )
    return tenants
