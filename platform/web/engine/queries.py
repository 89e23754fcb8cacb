"""Engines and counters as this gateway knows them. Invariant: nothing waits for an engine of the pool; one that does not answer
keeps its last numbers. Reading the drift of counters compares nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool, ObservedEngine
from loraplex.tenants.accounts.tenants import names_of
from loraplex.tenants.admission.counter_drift import DriftFinding, DriftLog
from loraplex.tenants.counters.counter_replies import PeriodUse
from loraplex.tenants.registry.versions import names_by_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine, by its place in the settings. `stats`: its newest numbers, which it sent at `known_at`; None before the first.

    `failure`: why it does not run, if that is known. `silent_s`: seconds since it was heard.
    """

    number: int
    connected: bool
    restarts: int
    failure: str | None
    stats: EngineStats | None
    known_at: datetime | None
    silent_s: float


class DriftRow(NamedTuple):
    """Counters of a tenant that differ in one day or month. `use`: what the ledger has more, negative where it has less."""

    tenant: str
    finding: DriftFinding
    use: PeriodUse


async def engine_states(engine: EngineClient, now: datetime) -> tuple[EngineState, ...]:
    """Describe every engine of a pool by its newest snapshot, or the single engine by its current state."""
    if isinstance(engine, EnginePool):
        return tuple(_state(number + 1, each) for number, each in engine.observed().items())
    stats, failure = None, None
    try:
        stats = await engine.stats()
    except EngineUnavailable as error:
        failure = str(error)
    return (
        EngineState(
            number=1,
            connected=stats is not None,
            restarts=0,
            failure=failure,
            stats=stats,
            known_at=None if stats is None else now,
            silent_s=0.0,
        ),
    )


def _state(number: int, engine: ObservedEngine) -> EngineState:
    return EngineState(
        number=number,
        connected=engine.connected,
        restarts=engine.restarts,
        failure=engine.failure,
        stats=engine.known_stats,
        known_at=engine.known_at,
        silent_s=engine.silent_for(),
    )


async def adapter_names(session: AsyncSession, states: Sequence[EngineState]) -> Mapping[str, str]:
    """Name the versions in the memory of engines by their digests, as an operator."""
    digests = {
        digest
        for each in states
        if each.stats is not None
        for digest in (*each.stats.resident_adapters, *(digest for _, digest in each.stats.host_adapters))
    }
    return await names_by_digest(session, digests)


async def drift_rows(session: AsyncSession, log: DriftLog) -> list[DriftRow]:
    """What this gateway's comparisons of counters with the ledger found lately, the newest first, as an operator."""
    findings = log.findings
    names = await names_of(session, {each.tenant_id for each in findings})
    return [
        DriftRow(names.get(each.tenant_id, str(each.tenant_id)), each, use)
        for each in findings
        for use in each.drift.behind
        if use.tokens or use.amount_nano
    ]
