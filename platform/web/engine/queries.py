"""What operators watch: engines, the shares of tenants in their steps, and the drift of counters.

Invariants: nothing waits for an engine of the pool, and one that does not answer keeps its last numbers. An engine knows cache
namespaces only: one of no registered tenant is shown with the others, never by itself. Drift is what this gateway found when it
compared counters with the ledger; reading it compares nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineStats, TenantSteps
from loraplex.platform.engines.pool import EnginePool, ObservedEngine, takes_requests
from loraplex.tenants.accounts.tenants import living_ids, names_of, weights_of
from loraplex.tenants.admission.counter_drift import DriftFinding, DriftLog
from loraplex.tenants.counters.counter_replies import PeriodUse
from loraplex.tenants.registry.versions import names_by_digest

EngineStateName: TypeAlias = Literal["starting", "up", "draining", "down"]
"""`starting`: it has never answered this gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine, by its number. `stats`: its newest numbers, which it sent at `known_at`; None before the first.

    `failure`: why it does not run, if that is known. `silent_s`: seconds since it was heard. `device`: what it has for itself, if
    this server started it, and `hardware` the name of that. `open_requests`: those of this gateway.
    """

    number: int
    address: str | None
    device: str | None
    hardware: str | None
    state: EngineStateName
    open_requests: int
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
        return tuple(_state(number, each) for number, each in engine.observed().items())
    stats, failure, hardware = None, None, None
    try:
        stats, hardware = await engine.stats(), engine.info().device or None
    except EngineUnavailable as error:
        failure = str(error)
    return (
        EngineState(
            number=0,
            address=None,
            device=None,
            hardware=hardware,
            state="up" if stats is not None else "down",
            open_requests=0 if stats is None else stats.running + stats.waiting,
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
        address=engine.address or None,
        device=engine.device,
        hardware=_hardware(engine),
        state=_state_name(engine),
        open_requests=engine.open_requests,
        connected=engine.connected,
        restarts=engine.restarts,
        failure=engine.failure,
        stats=engine.known_stats,
        known_at=engine.known_at,
        silent_s=engine.silent_for(),
    )


def _hardware(engine: ObservedEngine) -> str | None:
    with suppress(EngineUnavailable):
        return engine.info().device or None
    return None


def _state_name(engine: ObservedEngine) -> EngineStateName:
    if engine.connected:
        return "up" if takes_requests(engine) else "draining"
    return "starting" if engine.known_at is None and engine.failure is None else "down"


async def adapter_names(session: AsyncSession, states: Sequence[EngineState]) -> Mapping[str, str]:
    """Name the versions in the memory of engines by their digests, as an operator."""
    digests = {
        digest
        for each in states
        if each.stats is not None
        for digest in (*each.stats.resident_adapters, *(digest for _, digest in each.stats.host_adapters))
    }
    return await names_by_digest(session, digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """A tenant's part of the tokens of an engine's steps in the last minute. `waiting`: its requests that have not begun.

    `tenant_id`, `name` and `weight` are None for all tenants that are not listed, together.
    """

    tenant_id: UUID | None
    name: str | None
    weight: float | None
    prefill_tokens: int
    decode_tokens: int
    waiting: int

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


class TenantNamespaces:
    """Finds tenants by their cache namespaces. The registry is read again whenever a namespace is not known yet."""

    def __init__(self, namespace_of: Callable[[UUID], bytes]) -> None:
        self._namespace_of = namespace_of
        self._tenants: dict[bytes, UUID] = {}

    async def tenants(self, session: AsyncSession, namespaces: Collection[bytes]) -> dict[bytes, UUID]:
        """Return the tenants of these namespaces, as an operator; those of no tenant are missing."""
        if not self._tenants.keys() >= set(namespaces):
            self._tenants = {self._namespace_of(each): each for each in await living_ids(session)}
        return {each: self._tenants[each] for each in namespaces if each in self._tenants}


async def tenant_shares(
    session: AsyncSession, steps: Sequence[TenantSteps], namespaces: TenantNamespaces
) -> tuple[TenantShare, ...]:
    """Name the tenants of `steps`, the largest first; what belongs to no registered tenant is the last entry."""
    found = await namespaces.tenants(session, [each.namespace for each in steps if each.namespace])
    weights = await weights_of(session, found.values())
    listed, others = list[TenantShare](), list[TenantSteps]()
    for each in steps:
        tenant_id = found.get(each.namespace)
        if tenant_id is None or tenant_id not in weights:
            others.append(each)
            continue
        known = weights[tenant_id]
        listed.append(_share(tenant_id, known.name, known.weight, [each]))
    return (*listed, _share(None, None, None, others)) if others else tuple(listed)


def _share(
    tenant_id: UUID | None, name: str | None, weight: float | None, steps: Sequence[TenantSteps]
) -> TenantShare:
    return TenantShare(
        tenant_id=tenant_id,
        name=name,
        weight=weight,
        prefill_tokens=sum(each.prefill_tokens for each in steps),
        decode_tokens=sum(each.decode_tokens for each in steps),
        waiting=sum(each.waiting for each in steps),
    )


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
