"""How long an admission waits for a Valkey that does not answer, on an artificial clock: its own time and nothing else's."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.tenants.artificial_time import run, running_loop

from loraplex.tenants.admission.circuit_breaker import FAILURES, CircuitBreaker
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.reserve import Reserver
from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.errors import QuotaUnavailable, ValkeyUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger.usage_ledger import Reserved, ReservedUnder
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.policies import TenantPolicy
from loraplex.tenants.quotas.reservation import CounterReservation, LedgerReservation, ReservationRequest

CALLERS, CALLS = 16, 20
BOUND_S = 0.1
KEY = AuthenticatedKey(
    **{name: None for name in ("expires_at", "revoked_at", "suspended_at")},
    api_key_id=uuid4(),
    key_id="key",
    environment="live",
    secret_sha256=b"",
    scopes=[],
    allowed_cidrs=[],
    tenant_id=uuid4(),
    tenant_name="acme",
    weight=1.0,
    tier="standard",
    policy_epoch=1,
)


async def hang(_: CounterReservation) -> Any:
    await asyncio.Event().wait()


async def refuse(_: CounterReservation) -> Any:
    raise ValkeyUnavailable("connection refused")


async def be_slow_to_refuse(_: CounterReservation) -> Any:
    """As a connection that breaks just before it would be given up."""
    await asyncio.sleep(0.049)
    raise ValkeyUnavailable("connection reset")


@dataclass
class House:
    """A gate before counters that do what `ask` does, and books that keep everything at once."""

    ask: Callable[[CounterReservation], Awaitable[Any]]
    limits: QuotaLimits = field(default_factory=QuotaLimits)
    asked: int = 0

    async def admit(self, request: CounterReservation) -> Any:
        self.asked += 1
        return await self.ask(request)

    async def reserve(self, row: LedgerReservation) -> ReservedUnder:
        return ReservedUnder(Reserved.KEPT, 1)

    async def of(self, tenant_id: UUID, policy_epoch: int) -> TenantPolicy:
        return TenantPolicy(policy_epoch, self.limits)

    def gate(self) -> Reserver:
        stores: Any = SimpleNamespace(admit=self.admit, reserve=self.reserve, of=self.of)
        return Reserver(
            books=stores,
            counters=stores,
            seeding=stores,
            policies=stores,
            breaker=CircuitBreaker(),
            booking=CircuitBreaker(most_failures=1),
            denials=DenialLog(),
            share=LocalLimiter(running_loop().time),
            price=Price(prompt=0, cached_prompt=0, completion=0),
            gateway_id=uuid4(),
            settings=AdmissionConfig(),
            tell_overdue=lambda _: None,
            abandon=lambda *_: None,
        )


def request() -> ReservationRequest:
    return ReservationRequest(id=uuid7(), request_id="r", key=KEY, prompt_tokens=1, completion_tokens=1)


async def waits_of(house: House) -> list[float]:
    """Of `CALLERS` that ask at the same time, again and again."""
    gate, waits = house.gate(), list[float]()

    async def call() -> None:
        for _ in range(CALLS):
            begun = running_loop().time()
            try:
                assert (await gate.admit(request())).degraded
            except QuotaUnavailable:
                assert house.limits.has_periods()
            waits.append(running_loop().time() - begun)

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    assert gate.breaker.is_open
    return waits


@pytest.mark.parametrize("limits", [QuotaLimits(), QuotaLimits(tokens_per_day=5)], ids=["rates", "budgets"])
@pytest.mark.parametrize("ask", [hang, refuse, be_slow_to_refuse])
def test_no_admission_waits_longer_than_the_bound(
    ask: Callable[[CounterReservation], Awaitable[Any]], limits: QuotaLimits
) -> None:
    house = House(ask, limits)
    waits = run(waits_of(house))
    assert len(waits) == CALLERS * CALLS
    assert max(waits) <= 0.9 * BOUND_S + 1e-6
    # Those that were waiting when the third failed, and what these tried again; nobody later.
    assert sum(wait > 0 for wait in waits) <= CALLERS and house.asked < CALLERS + FAILURES
