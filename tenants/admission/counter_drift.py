"""Compares quota counters with the ledger, and changes neither.

Invariant: a difference counts if it is the same twice, some seconds apart: use that is on its way to a store causes others.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.pricing import PICO_PER_NANO
from loraplex.tenants.counters.counter_replies import PeriodUse, SettledUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import AdmissionEpoch


@dataclass(frozen=True, slots=True)
class CounterDrift:
    """The amounts by which the counters of an epoch are behind the ledger; negative where they are ahead."""

    epoch: int
    behind: tuple[PeriodUse, ...]

    @property
    def pico(self) -> int:
        """The size of the largest difference, in pico-units; a day is part of its month."""
        return max(abs(each.amount_nano) for each in self.behind) * PICO_PER_NANO

    @property
    def is_ahead(self) -> bool:
        """Whether the counters lack nothing: a gateway without PostgreSQL may have settled the rest."""
        return all(each.tokens <= 0 and each.amount_nano <= 0 for each in self.behind)


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
    return None if counted is None else await compare_counters(ledger, tenant_id, counted)


async def compare_counters(
    ledger: UsageLedger, tenant_id: UUID, counted: SettledUse, waited_s: float = 0.0
) -> CounterDrift | None:
    """How far the counters were behind the ledger when they were read, `waited_s` ago. None also while they are rebuilt, and
    where the ledger has no answer.
    """
    expected = await ledger.settled(tenant_id, counted, waited_s)
    if expected is None or expected.epoch != counted.epoch or expected.uses == counted.uses:
        return None
    behind = tuple(
        PeriodUse(right.period, right.tokens - there.tokens, right.amount_nano - there.amount_nano)
        for right, there in zip(expected.uses, counted.uses, strict=True)
    )
    return CounterDrift(counted.epoch, behind)
