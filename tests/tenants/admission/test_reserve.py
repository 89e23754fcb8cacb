"""How long an admission waits for a Valkey that does not reply, on an artificial clock."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.tenants.artificial_time import run, running_loop

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.recent_refusals import RecentRefusals
from loraplex.tenants.admission.reserve import Reserver
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.circuit_breaker import FAILURES, CircuitBreaker
from loraplex.tenants.errors import QuotaUnavailable, ValkeyUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger.usage_ledger import Reserved, ReservedUnder
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.policies import TenantPolicy
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest

CALLERS, CALLS = 16, 20
BOUND_S = 0.1
TENANT, KEY = uuid4(), uuid4()


async def hang(_: ReservationRequest) -> Any:
    await asyncio.Event().wait()


async def refuse(_: ReservationRequest) -> Any:
    raise ValkeyUnavailable("connection refused")


async def be_slow_to_refuse(_: ReservationRequest) -> Any:
    """As a connection that breaks just before it would be given up."""
    await asyncio.sleep(0.049)
    raise ValkeyUnavailable("connection reset")


@dataclass
class StubStores:
    """Counters that do what `respond` does, and a ledger that stores everything at once."""

    respond: Callable[[ReservationRequest], Awaitable[Any]]
    limits: QuotaLimits = field(default_factory=QuotaLimits)
    calls: int = 0

    async def reserve(self, request: ReservationRequest) -> Any:
        self.calls += 1
        return await self.respond(request)

    async def store(self, reservation: Reservation, *_: Any) -> ReservedUnder:
        return ReservedUnder(Reserved.KEPT, 1)

    async def of(self, tenant_id: UUID, policy_epoch: int) -> TenantPolicy:
        return TenantPolicy(policy_epoch, self.limits)

    def reserver(self) -> Reserver:
        stores: Any = SimpleNamespace(reserve=self.reserve, of=self.of)
        ledger: Any = SimpleNamespace(reserve=self.store)
        return Reserver(
            ledger=ledger,
            counters=stores,
            counter_rebuild=stores,
            policies=stores,
            breaker=CircuitBreaker(),
            ledger_breaker=CircuitBreaker(max_failures=1),
            denials=DenialLog(),
            recent_refusals=RecentRefusals(running_loop().time),
            local_limiter=LocalLimiter(running_loop().time),
            price=Price(prompt=0, cached_prompt=0, completion=0),
            gateway_id=uuid4(),
            settings=AdmissionConfig(),
            report_overdue=lambda _: None,
            cancel_later=lambda *_: None,
        )


def request() -> ReservationRequest:
    return ReservationRequest(
        id=uuid7(), tenant_id=TENANT, api_key_id=KEY, policy_epoch=1, prompt_tokens=1, completion_tokens=1
    )


async def waits_of(stores: StubStores) -> list[float]:
    """The waits of `CALLERS` concurrent callers with `CALLS` calls each."""
    reserver, waits = stores.reserver(), list[float]()

    async def call() -> None:
        for _ in range(CALLS):
            begun = running_loop().time()
            try:
                assert (await reserver.reserve(request())).degraded
            except QuotaUnavailable:
                assert stores.limits.has_periods()
            waits.append(running_loop().time() - begun)

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    assert reserver.breaker.is_open
    return waits


@pytest.mark.parametrize("limits", [QuotaLimits(), QuotaLimits(tokens_per_day=5)], ids=["rates", "budgets"])
@pytest.mark.parametrize("respond", [hang, refuse, be_slow_to_refuse])
def test_no_admission_waits_longer_than_the_bound(
    respond: Callable[[ReservationRequest], Awaitable[Any]], limits: QuotaLimits
) -> None:
    stores = StubStores(respond, limits)
    waits = run(waits_of(stores))
    assert len(waits) == CALLERS * CALLS
    assert max(waits) <= 0.9 * BOUND_S + 1e-6
    # Only calls that were waiting when the third failed, and their second attempts; no later call.
    assert sum(wait > 0 for wait in waits) <= CALLERS and stores.calls < CALLERS + FAILURES
