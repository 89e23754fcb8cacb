"""Compares quota counters with the ledger, changes neither, and keeps what the comparisons of a gateway found.

Invariant: a difference counts if it is the same twice, some seconds apart: use that is on its way to a store causes others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import select

from loraplex.tenants.counters.counter_replies import PeriodUse, SettledUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.drift import ComparedRange, Comparison
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import AdmissionEpoch
from loraplex.tenants.periods import period_start, periods_of
from loraplex.tenants.valkey import open_valkey

APART_S: Final = 5.0
"""Between the two comparisons of counters that differ."""
MAX_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class CounterDrift:
    """The amounts by which the counters of an epoch are behind the ledger; negative where they are ahead."""

    epoch: int
    behind: tuple[PeriodUse, ...]

    @property
    def pico(self) -> int:
        """The size of the largest difference, in pico-units; a day is part of its month."""
        return max(abs(each.amount_pico) for each in self.behind)

    @property
    def is_ahead(self) -> bool:
        """Whether the counters lack nothing: a gateway without PostgreSQL may have settled the rest."""
        return all(each.tokens <= 0 and each.amount_nano <= 0 for each in self.behind)


@asynccontextmanager
async def opened_counters(database: Database, redis_url: str) -> AsyncIterator[tuple[UsageLedger, Counters]]:
    """The ledger, and the counters in the Valkey of that address, as long as the block runs."""
    client, ledger = open_valkey(redis_url), UsageLedger(database)
    try:
        yield ledger, Counters(client)
    finally:
        await ledger.close()
        await client.aclose()


async def compare_all_counters(database: Database, redis_url: str) -> Comparison:
    """Compare the counters of all tenants with the totals of their current day and month. Raises `StoreUnavailable`."""
    now = datetime.now(UTC)
    async with database.as_operator() as session:
        counted = await session.scalars(select(AdmissionEpoch.tenant_id).order_by(AdmissionEpoch.tenant_id))
        tenants = counted.all()
    async with opened_counters(database, redis_url) as (ledger, counters):
        first = {tenant_id: await counter_drift(ledger, counters, tenant_id) for tenant_id in tenants}
        if suspected := {tenant_id: drift for tenant_id, drift in first.items() if drift is not None}:
            await asyncio.sleep(APART_S)
        again = {tenant_id: await counter_drift(ledger, counters, tenant_id) for tenant_id in suspected}
    drifts = {tenant_id: drift for tenant_id, drift in suspected.items() if drift == again[tenant_id]}
    return Comparison(
        part=ComparedRange(compared="counters", start=period_start(periods_of(now).month), end=now),
        sums=len(tenants),
        differing=len(drifts),
        drift_pico=sum(drift.pico for drift in drifts.values()),
        named=tuple(f"tenant {tenant_id}: {_too_much(drift)}" for tenant_id, drift in drifts.items()),
    )


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


def _too_much(drift: CounterDrift) -> str:
    return ", ".join(
        f"{use.period} tokens {-use.tokens:+d} amount_nano {-use.amount_nano:+d}" for use in drift.behind
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """Counters of a tenant that differ from the ledger. `corrected_at` None: they are compared once more, or wait for updates
    of requests that have ended.
    """

    tenant_id: UUID
    drift: CounterDrift
    since: datetime
    corrected_at: datetime | None = None


@dataclass(slots=True)
class DriftLog:
    """The newest findings of one gateway, `MAX_KEPT` at most. `comparisons` counts those since its start, `compared_at` is when the
    last one ended.
    """

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    comparisons: int = 0
    compared_at: datetime | None = None
    _found: dict[UUID, DriftFinding] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[DriftFinding, ...]:
        """The findings, the newest first."""
        return tuple(reversed(self._found.values()))

    @property
    def open(self) -> int:
        """The number of tenants whose counters differ now."""
        return sum(each.corrected_at is None for each in self._found.values())

    def compared(self, tenant_id: UUID, drift: CounterDrift | None) -> None:
        """Note a comparison. None: the counters agree with the ledger, so an open finding ends."""
        self.comparisons += 1
        self.compared_at = self.now()
        known = self._found.get(tenant_id)
        is_open = known is not None and known.corrected_at is None
        if drift is None:
            if is_open:
                del self._found[tenant_id]
            return
        since = known.since if known is not None and is_open else self.compared_at
        self._keep(DriftFinding(tenant_id=tenant_id, drift=drift, since=since))

    def corrected(self, tenant_id: UUID) -> None:
        """Note that the counters of a finding were rebuilt."""
        self._keep(replace(self._found[tenant_id], corrected_at=self.now()))

    def _keep(self, finding: DriftFinding) -> None:
        self._found.pop(finding.tenant_id, None)
        self._found[finding.tenant_id] = finding
        if len(self._found) > MAX_KEPT:
            del self._found[next(iter(self._found))]
