"""One cell of the matrix: a fault in a component under load, and what clients, ledger and quotas say afterwards.

Invariant: a cell's tenants are its own, so that its figures are of its requests alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import func, select
from tests.benchmarks.chaos.faults import FAULTS
from tests.benchmarks.chaos.readiness import ReadinessFigures, ReadinessWatch, readiness_figures
from tests.benchmarks.chaos.world import SERVED_NAME, World

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.drills.ledger_drift import LedgerDrift, measure_drift
from loraplex.platform.drills.traffic import (
    CLIENT_TIMEOUT,
    CONNECTION_LOST,
    RequestOutcome,
    Traffic,
    recovery_s,
)
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.admission.counter_drift import compare_all_counters
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.drift import compare_ledger
from loraplex.tenants.models import Quota, UsageRecord
from loraplex.tenants.quotas.limits import COUNTED, PERIODIC
from loraplex.tenants.scopes import INFERENCE

AMPLE: Final = 100_000_000
TIGHT_TOKENS: Final = 1500
"""Tokens per day of the tenant whose quota the cell uses up."""
OUTPUT_LEN: Final = 40
WARM_UP_S: Final = 2.0
WARM_RESPONSES: Final = 4
"""Of each tenant, before `WARM_UP_S` begins: then both gateways know its key."""
AFTER_S: Final = 5.0
"""So long without an error is a recovery."""
RECOVERED_S: Final = 60.0
SHIPPED_S: Final = 60.0
TIMEOUT_S: Final = 45.0
"""A client gives up after it."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of one cell, with limits at both levels that it never reaches, but for `tokens_per_day` if that is given."""

    name: str
    rate_per_s: float
    limits: Sequence[str] = COUNTED
    tokens_per_day: int | None = None


TENANTS: Final = (
    Tenant("acme", 3.0),
    # Without Valkey, tenants with a limit per day or month are refused, others are served.
    Tenant("other", 4.0, limits=sorted({*COUNTED} - {*PERIODIC})),
    Tenant("tight", 2.0, tokens_per_day=TIGHT_TOKENS),
)


@dataclass(slots=True, kw_only=True)
class CellResult:
    """What a cell came to. `unexpected_ends`: responses that the server cut off without an error. `given_up`: requests whose clients
    waited for `TIMEOUT_S`. `refused`: by the quota that is used up.
    """

    requests: int = 0
    refused: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unexpected_ends: int = 0
    given_up: int = 0
    fault_s: float = 0.0
    recovery_s: float | None = None
    drifts: list[LedgerDrift] = field(default_factory=list)
    sums_drift_pico: int = 0
    quota_differences: list[str] = field(default_factory=list)
    over_quota_tokens: int = 0
    restarts: int = 0
    readiness: ReadinessFigures = field(default_factory=ReadinessFigures)

    @property
    def drift_pico(self) -> int:
        """Of the rows from what clients know, and of all sums from the rows."""
        return sum(each.drift_pico for each in self.drifts) + self.sums_drift_pico

    @property
    def quotas_exact(self) -> bool:
        """Whether counters and ledger agree, nothing stays reserved, and no limit was exceeded."""
        return not self.quota_differences and not self.over_quota_tokens


@dataclass(frozen=True, slots=True)
class Customer:
    tenant: Tenant
    id: UUID
    traffic: Traffic


async def run_cell(world: World, fault: str, component: str, seconds: float) -> CellResult:
    """Load the installation, inject the fault, wait for the recovery, and compare everything."""
    database = Database(world.database_url, pool_size=3)
    result = CellResult()
    before = sum(each.restarts for each in world.components.values())
    try:
        async with AsyncExitStack() as stack:
            customers = [await enter(world, database, tenant, stack) for tenant in TENANTS]
            watch = await stack.enter_async_context(ReadinessWatch(world.base_urls))
            await warmed_up(customers)
            began = time.monotonic()
            await FAULTS[fault](world, component, seconds)
            result.fault_s = time.monotonic() - began
            await recovered(customers, began)
        count_outcomes(result, customers, began)
        result.readiness = readiness_figures(watch.samples, unlimited(customers), began)
        result.restarts = sum(each.restarts for each in world.components.values()) - before
        await compare(world, database, customers, result)
    finally:
        await database.close()
    return result


async def enter(world: World, database: Database, tenant: Tenant, stack: AsyncExitStack) -> Customer:
    """Create a tenant with every limit, and begin its requests."""
    limits = dict.fromkeys(tenant.limits, AMPLE)
    if tenant.tokens_per_day is not None:
        limits["tokens_per_day"] = tenant.tokens_per_day
    async with database.as_operator() as session:
        made = await TenantRepository(session).create(f"{tenant.name}-{uuid4().hex[:8]}")
        issued = await KeyRepository(session).create(made.id, "chaos", [INFERENCE])
        session.add(Quota(tenant_id=made.id, **limits))
        session.add(Quota(tenant_id=made.id, api_key_id=issued.record.id, **limits))
    # Every other request is streamed: in this order, each gateway gets as many streams as whole responses.
    urls = [*world.base_urls, *reversed(world.base_urls)]
    traffic = Traffic(
        urls, issued.plaintext, SERVED_NAME, tenant.rate_per_s * world.load, OUTPUT_LEN, timeout_s=TIMEOUT_S
    )
    return Customer(tenant, made.id, await stack.enter_async_context(traffic))


async def warmed_up(customers: Sequence[Customer]) -> None:
    """Wait until every tenant is served, and `WARM_UP_S` more. Raises `BenchFailed`."""
    deadline = time.monotonic() + RECOVERED_S
    while any(
        sum(outcome.complete for outcome in customer.traffic.outcomes) < WARM_RESPONSES
        for customer in customers
    ):
        if time.monotonic() > deadline:
            raise BenchFailed(f"a tenant was not served within {RECOVERED_S:g} s, before any fault")
        await asyncio.sleep(0.1)
    await asyncio.sleep(WARM_UP_S)


async def recovered(customers: Sequence[Customer], began: float) -> None:
    """Wait until no request has failed for `AFTER_S`, at most `RECOVERED_S`."""
    ended = time.monotonic()
    while time.monotonic() < ended + RECOVERED_S:
        await asyncio.sleep(0.5)
        found = recovery_s(unlimited(customers), began)
        if found is not None and time.monotonic() > max(began + found, ended) + AFTER_S:
            return


def unlimited(customers: Sequence[Customer]) -> list[RequestOutcome]:
    """The outcomes of tenants that no limit refuses."""
    return [
        outcome
        for customer in customers
        if customer.tenant.tokens_per_day is None
        for outcome in customer.traffic.outcomes
    ]


def count_outcomes(result: CellResult, customers: Sequence[Customer], began: float) -> None:
    """Sum up what clients saw; refusals by the tight quota are no errors."""
    for customer in customers:
        for outcome in customer.traffic.outcomes:
            result.requests += 1
            if customer.tenant.tokens_per_day is not None and outcome.status == 429:
                result.refused += 1
            elif not outcome.complete:
                result.errors[f"{outcome.status} {outcome.code}"] += 1
                result.unexpected_ends += outcome.code == CONNECTION_LOST
                result.given_up += outcome.code == CLIENT_TIMEOUT
    result.recovery_s = recovery_s(unlimited(customers), began)


async def compare(
    world: World, database: Database, customers: Sequence[Customer], result: CellResult
) -> None:
    """Rows with outcomes, sums with rows, counters with sums, and use with limits."""
    result.drifts = await asyncio.gather(
        *(measure_drift(database, each.id, each.traffic.outcomes, SHIPPED_S) for each in customers)
    )
    for customer in customers:
        limit = customer.tenant.tokens_per_day
        if limit is not None:
            days = await tokens_of_days(database, customer.id)
            result.over_quota_tokens += sum(max(0, used - limit) for used in days)
    sums = await compare_ledger(database)
    result.sums_drift_pico = sum(each.drift_pico for each in sums)
    counters = await compare_all_counters(database, world.redis_url)
    result.quota_differences = [
        *counters.named,
        *(name for each in sums for name in each.named),
        *(f"{each.open} reservations are left" for each in result.drifts if each.open),
    ]


async def tokens_of_days(database: Database, tenant_id: UUID) -> Sequence[int]:
    """The tokens that the ledger has of each of a tenant's days: at midnight, and where a clock jumps across it, there are two."""
    row = UsageRecord
    tokens = func.sum(row.uncached_tokens + row.cached_tokens + row.completion_tokens)
    async with database.as_operator() as session:
        days = await session.scalars(select(tokens).where(row.tenant_id == tenant_id).group_by(row.day))
        return [int(used) for used in days]
