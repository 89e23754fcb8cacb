"""Three gateways at random, while Valkey forgets everything and a gateway dies: no limit is exceeded, nothing is lost."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from tests.tenants.admission.gateways import (
    PRICE,
    SETTINGS,
    TenantWithGateways,
    all_shipped,
    check_ledger,
    family,
    make_tenant_with_gateways,
)

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.billing.pricing import amount_nano
from loraplex.tenants.database import Database
from loraplex.tenants.errors import LimitExceeded, QuotaUnavailable
from loraplex.tenants.quotas.reservation import Reservation, SettledUsage

TOKENS, CONCURRENT, BUDGET = 2_500, 6, 9
LIMITS = {"tokens_per_day": TOKENS, "budget_per_month": BUDGET, "concurrent_requests": CONCURRENT}
WORKERS, ATTEMPTS = 6, 30
FLUSHES, FLUSH_SECONDS = 6, 0.1
STRETCH_SECONDS = 0.01
RATE, RESEEDINGS, RESEED_SECONDS = 6_000, 6, 0.1


@dataclass
class Ledger:
    """What happened, recorded outside the system under test; amounts in nano-units."""

    open: dict[UUID, tuple[int, int]] = field(default_factory=dict)
    tokens: int = 0
    nano: int = 0
    settled: int = 0
    admitted: int = 0
    refused: int = 0

    def admit(self, reservation: Reservation) -> None:
        self.open[reservation.id] = (reservation.request.tokens, reservation.request.amount_nano)
        self.admitted += 1
        assert self.tokens + sum(tokens for tokens, _ in self.open.values()) <= TOKENS
        assert self.nano + sum(nano for _, nano in self.open.values()) <= BUDGET * 1000
        assert len(self.open) <= CONCURRENT

    def settle(self, reservation: Reservation, usage: SettledUsage) -> None:
        del self.open[reservation.id]
        self.settled += 1
        self.tokens += usage.prompt_tokens + usage.completion_tokens
        pico = PRICE.amount_pico(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.nano += amount_nano(pico)


class RateLedger(Ledger):
    """One rate; `most` is the largest number that may have been admitted by now."""

    def __init__(self, most: Callable[[], float]) -> None:
        super().__init__()
        self._most = most

    def admit(self, reservation: Reservation) -> None:
        self.open[reservation.id] = (reservation.request.tokens, reservation.request.amount_nano)
        self.admitted += 1
        assert self.tokens + sum(tokens for tokens, _ in self.open.values()) <= self._most()


class Worker:
    """Admits with one of `keys` or the tenant's first, uses less than it may, settles or gives back."""

    def __init__(
        self,
        tenant: TenantWithGateways,
        ledger: Ledger,
        seed: int,
        keys: Sequence[AuthenticatedKey | None] = (None,),
    ) -> None:
        self._keys = keys
        self._house = tenant
        self._ledger = ledger
        self._random = random.Random(seed)

    async def run(self, gateway: QuotaAdmissionController, attempts: int = ATTEMPTS) -> None:
        for _ in range(attempts):
            prompt, completion = self._random.randint(1, 30), self._random.randint(1, 60)
            try:
                key = self._random.choice(self._keys)
                reservation = await gateway.admit(self._house.request(prompt, completion, key))
            except (LimitExceeded, QuotaUnavailable):
                self._ledger.refused += 1
                await asyncio.sleep(self._random.random() / 200)
                continue
            self._ledger.admit(reservation)
            await asyncio.sleep(self._random.choice((0.0, 0.0, 0.1)))
            await self._end(gateway, reservation, prompt, completion)

    async def _end(
        self, gateway: QuotaAdmissionController, reservation: Reservation, prompt: int, completion: int
    ) -> None:
        if self._random.random() < 0.2:
            del self._ledger.open[reservation.id]
            await gateway.cancel(reservation)
            return
        usage = SettledUsage(
            outcome="aborted",
            prompt_tokens=prompt,
            cached_tokens=self._random.randint(0, prompt),
            completion_tokens=self._random.randint(0, completion),
        )
        self._ledger.settle(reservation, usage)
        await asyncio.gather(*(gateway.settle(reservation, usage) for _ in range(2)))


def stretch(gateway: QuotaAdmissionController, rolls: random.Random) -> None:
    """Every step waits a while before and after, so that others come between."""

    def stretched(step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def waiting(*arguments: Any, **more: Any) -> Any:
            await asyncio.sleep(rolls.random() * STRETCH_SECONDS)
            reply = await step(*arguments, **more)
            await asyncio.sleep(rolls.random() * STRETCH_SECONDS)
            return reply

        return waiting

    for target, names in (
        (gateway.maintenance.counters, ("reserve", "settle", "rebuild", "heartbeat")),
        (gateway.maintenance.ledger, ("reserve", "settle", "take_snapshot")),
    ):
        for name in names:
            setattr(target, name, stretched(getattr(target, name)))


async def forget(tenant: TenantWithGateways, seed: int) -> None:
    """Lose the counters often, but not at the end: a wrong count must stay visible."""
    rolls = random.Random(seed)
    for _ in range(FLUSHES):
        await asyncio.sleep(rolls.random() * FLUSH_SECONDS)
        await tenant.flush()


async def limited_house(database: Database, valkey_url: str) -> TenantWithGateways:
    return await make_tenant_with_gateways(database, valkey_url, "acme", **LIMITS)


async def kill(tasks: list[asyncio.Task[None]]) -> None:
    """Until they are gone: Python 3.11 loses a cancellation that meets the end of a wait inside `asyncio.wait_for`."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.05)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("of", ["tenant", "group"])
async def test_counters_that_are_lost_repeatedly_miss_nothing(
    database: Database, valkey_url: str, seed: int, of: str
) -> None:
    ledger, keys = Ledger(), list[AuthenticatedKey | None]([None])
    if of == "tenant":
        tenant = await limited_house(database, valkey_url)
    else:
        tenant = await make_tenant_with_gateways(database, valkey_url)
        keys = [*await family(tenant, 3, **LIMITS)]
    async with tenant.gateway() as first, tenant.gateway() as second, tenant.gateway() as third:
        gateways = (first, second, third)
        for gateway in gateways:
            stretch(gateway, random.Random(seed))
        await asyncio.gather(
            forget(tenant, seed),
            *(
                Worker(tenant, ledger, seed * 100 + number, keys).run(gateway)
                for number in range(WORKERS)
                for gateway in gateways
            ),
        )
        assert await check_ledger(tenant, second) == (ledger.tokens, ledger.settled)
        assert (ledger.admitted > 40, ledger.refused > 40) == (True, True)


@pytest.mark.parametrize("seed", range(2))
async def test_a_rate_holds_while_living_counters_are_rebuilt_repeatedly(
    database: Database, valkey_url: str, seed: int
) -> None:
    """Buckets continue, or start empty if rebuilds overtook each other: nothing is given twice."""
    tenant, began = (
        await make_tenant_with_gateways(database, valkey_url, tokens_per_minute=RATE),
        time.monotonic(),
    )
    ledger = RateLedger(lambda: RATE * (1 + (time.monotonic() - began) / 60))
    async with tenant.gateway() as first, tenant.gateway() as second, tenant.gateway() as third:
        gateways = (first, second, third)
        await first.cancel(await first.admit(tenant.request(1, 1)))
        for gateway in gateways:
            stretch(gateway, random.Random(seed))

        async def rebuild_counters() -> None:
            for _ in range(RESEEDINGS):
                await asyncio.sleep(RESEED_SECONDS)
                # It gives up where the other gateways, which raise the epoch too, overtake each of its tries.
                with suppress(QuotaUnavailable):
                    await third.maintenance.settlements.counter_rebuild.rebuild(tenant.tenant_id)

        await asyncio.gather(
            rebuild_counters(),
            *(
                Worker(tenant, ledger, seed * 100 + number).run(gateway)
                for number in range(WORKERS)
                for gateway in gateways
            ),
        )
        assert await check_ledger(tenant, second) == (ledger.tokens, ledger.settled)
        assert await second.maintenance.ledger.epoch(tenant.tenant_id) > RESEEDINGS
        assert ledger.admitted


async def test_reservations_of_a_dead_gateway_are_given_back(database: Database, valkey_url: str) -> None:
    tenant, ledger = await limited_house(database, valkey_url), Ledger()
    now = [1000.0]
    async with tenant.gateway(clock=lambda: now[0]) as first, tenant.gateway() as second:
        async with tenant.gateway() as doomed:
            for _ in range(2):
                ledger.admit(await doomed.admit(tenant.request()))
            stretch(doomed, random.Random(1))
            dying = [asyncio.create_task(Worker(tenant, ledger, each).run(doomed)) for each in range(WORKERS)]
            living = [asyncio.create_task(Worker(tenant, ledger, 9).run(first, 20)) for _ in range(WORKERS)]
            await asyncio.sleep(0.15)
            await kill(dying)
            await asyncio.gather(*living)
            doomed.maintenance.requests.unsettled.clear()
        await first.maintenance.heartbeat()
        # What ended at a living gateway is open in the ledger until the journal ships.
        await all_shipped(first)
        lost = len(await tenant.rows("SELECT id FROM reservations"))
        assert lost >= 2
        await tenant.let_leases_run_out()
        assert await first.maintenance.reaper.reap() == 0
        now[0] += SETTINGS.lease_s
        assert await first.maintenance.reaper.reap() == lost
        await check_ledger(tenant, second)
        assert await tenant.rows("SELECT outcome FROM usage_records WHERE outcome = 'unknown'") == []
