"""Compares the counters of all tenants with the ledger, on demand and without changing either.

Invariant: a difference counts if it is the same twice, some seconds apart: use that is on its way to a store causes others.
"""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.admission.reconciliation import CounterDrift
from loraplex.tenants.counters.counter_replies import PeriodUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import AdmissionEpoch


async def counted_tenants(session: AsyncSession) -> Sequence[UUID]:
    """The tenants whose counters were ever built, in a session of an operator."""
    return (await session.scalars(select(AdmissionEpoch.tenant_id).order_by(AdmissionEpoch.tenant_id))).all()


async def counter_drifts(
    ledger: UsageLedger, counters: Counters, tenants: Sequence[UUID], apart_s: float
) -> dict[UUID, CounterDrift]:
    """The drift of each tenant that has one. Raises `StoreUnavailable`."""
    first = {tenant_id: await counter_drift(ledger, counters, tenant_id) for tenant_id in tenants}
    suspected = {tenant_id: drift for tenant_id, drift in first.items() if drift is not None}
    if suspected:
        await asyncio.sleep(apart_s)
    again = {tenant_id: await counter_drift(ledger, counters, tenant_id) for tenant_id in suspected}
    return {tenant_id: drift for tenant_id, drift in suspected.items() if drift == again[tenant_id]}


async def counter_drift(ledger: UsageLedger, counters: Counters, tenant_id: UUID) -> CounterDrift | None:
    """How far a tenant's counters are behind the ledger now. None if they agree, are lost, or are being rebuilt."""
    counted = await counters.settled(tenant_id)
    expected = None if counted is None else await ledger.settled(tenant_id, counted)
    if counted is None or expected is None:
        return None
    if expected.epoch != counted.epoch or expected.uses == counted.uses:
        return None
    behind = tuple(
        PeriodUse(right.period, right.tokens - there.tokens, right.amount_nano - there.amount_nano)
        for right, there in zip(expected.uses, counted.uses, strict=True)
    )
    return CounterDrift(counted.epoch, behind)
