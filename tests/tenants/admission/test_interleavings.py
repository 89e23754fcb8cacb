"""Three gateways at random, while Valkey forgets everything and a gateway dies: no limit is exceeded, nothing is lost."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from tests.tenants.admission.gateways import PRICE, SETTINGS, House, check_books, make_house

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.billing.pricing import amount_nano
from loraplex.tenants.database import Database
from loraplex.tenants.errors import LimitExceeded, QuotaUnavailable
from loraplex.tenants.quotas.reservation import Reservation, SettledUsage

TOKENS, CONCURRENT, BUDGET = 2_500, 6, 9
WORKERS, ATTEMPTS = 6, 30
FLUSHES, FLUSH_SECONDS = 6, 0.1
STRETCH_SECONDS = 0.01
RATE, RESEEDINGS, RESEED_SECONDS = 6_000, 6, 0.1


@dataclass
class Ledger:
    """What really happened, kept beside the system under test: amounts in nano-units."""

    open: dict[UUID, tuple[int, int]] = field(default_factory=dict)
    tokens: int = 0
    nano: int = 0
    settled: int = 0
    admitted: int = 0
    refused: int = 0

    def admit(self, admission: Reservation) -> None:
        self.open[admission.id] = (admission.hold.tokens, admission.hold.amount_nano)
        self.admitted += 1
        assert self.tokens + sum(tokens for tokens, _ in self.open.values()) <= TOKENS
        assert self.nano + sum(nano for _, nano in self.open.values()) <= BUDGET * 1000
        assert len(self.open) <= CONCURRENT

    def settle(self, admission: Reservation, usage: SettledUsage) -> None:
        del self.open[admission.id]
        self.settled += 1
        self.tokens += usage.prompt_tokens + usage.completion_tokens
        pico = PRICE.amount_pico(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.nano += amount_nano(pico)


class RateLedger(Ledger):
    """Of one rate: `most` is what may have been let in by now."""

    def __init__(self, most: Callable[[], float]) -> None:
        super().__init__()
        self._most = most

    def admit(self, admission: Reservation) -> None:
        self.open[admission.id] = (admission.hold.tokens, admission.hold.amount_nano)
        self.admitted += 1
        assert self.tokens + sum(tokens for tokens, _ in self.open.values()) <= self._most()


class Worker:
    """Admits, uses less than it may, settles or gives back."""

    def __init__(self, house: House, ledger: Ledger, seed: int) -> None:
        self._house = house
        self._ledger = ledger
        self._random = random.Random(seed)

    async def run(self, gateway: QuotaAdmissionController, attempts: int = ATTEMPTS) -> None:
        for _ in range(attempts):
            prompt, completion = self._random.randint(1, 30), self._random.randint(1, 60)
            try:
                admission = await gateway.admit(self._house.request(prompt, completion))
            except (LimitExceeded, QuotaUnavailable):
                self._ledger.refused += 1
                await asyncio.sleep(self._random.random() / 200)
                continue
            self._ledger.admit(admission)
            await asyncio.sleep(self._random.choice((0.0, 0.0, 0.1)))
            await self._end(gateway, admission, prompt, completion)

    async def _end(
        self, gateway: QuotaAdmissionController, admission: Reservation, prompt: int, completion: int
    ) -> None:
        if self._random.random() < 0.2:
            del self._ledger.open[admission.id]
            await gateway.release(admission)
            return
        usage = SettledUsage(
            outcome="aborted",
            prompt_tokens=prompt,
            cached_tokens=self._random.randint(0, prompt),
            completion_tokens=self._random.randint(0, completion),
        )
        self._ledger.settle(admission, usage)
        await asyncio.gather(*(gateway.settle(admission, usage) for _ in range(2)))


def stretch(gateway: QuotaAdmissionController, rolls: random.Random) -> None:
    """Every step waits a while before and after, so that others come between."""

    def stretched(step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def waiting(*arguments: Any, **more: Any) -> Any:
            await asyncio.sleep(rolls.random() * STRETCH_SECONDS)
            answer = await step(*arguments, **more)
            await asyncio.sleep(rolls.random() * STRETCH_SECONDS)
            return answer

        return waiting

    for target, names in (
        (gateway.upkeep.counters, ("admit", "settle", "seed", "heartbeat")),
        (gateway.upkeep.books, ("reserve", "settle", "seed")),
    ):
        for name in names:
            setattr(target, name, stretched(getattr(target, name)))


async def forget(house: House, seed: int) -> None:
    """Often, and not to the end: what was counted wrong must not be forgotten too."""
    rolls = random.Random(seed)
    for _ in range(FLUSHES):
        await asyncio.sleep(rolls.random() * FLUSH_SECONDS)
        await house.flush()


async def limited_house(database: Database, valkey_url: str) -> House:
    return await make_house(
        database,
        valkey_url,
        tokens_per_day=TOKENS,
        budget_per_month=BUDGET,
        concurrent_requests=CONCURRENT,
    )


async def kill(tasks: list[asyncio.Task[None]]) -> None:
    """Until they are gone: Python 3.11 loses a cancellation that meets the end of a wait inside `asyncio.wait_for`."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.05)


@pytest.mark.parametrize("seed", range(2))
async def test_counters_that_are_lost_again_and_again_miss_nothing(
    database: Database, valkey_url: str, seed: int
) -> None:
    house, ledger = await limited_house(database, valkey_url), Ledger()
    async with house.gateway() as first, house.gateway() as second, house.gateway() as third:
        gateways = (first, second, third)
        for gateway in gateways:
            stretch(gateway, random.Random(seed))
        await asyncio.gather(
            forget(house, seed),
            *(
                Worker(house, ledger, seed * 100 + number).run(gateway)
                for number in range(WORKERS)
                for gateway in gateways
            ),
        )
        assert await check_books(house, second) == (ledger.tokens, ledger.settled)
        assert (ledger.admitted > 40, ledger.refused > 40) == (True, True)


@pytest.mark.parametrize("seed", range(2))
async def test_a_rate_holds_while_living_counters_are_seeded_again_and_again(
    database: Database, valkey_url: str, seed: int
) -> None:
    """Buckets go on, or start empty where seedings overtook each other: nothing is given twice."""
    house, began = await make_house(database, valkey_url, tokens_per_minute=RATE), time.monotonic()
    ledger = RateLedger(lambda: RATE * (1 + (time.monotonic() - began) / 60))
    async with house.gateway() as first, house.gateway() as second, house.gateway() as third:
        gateways = (first, second, third)
        await first.release(await first.admit(house.request(1, 1)))
        for gateway in gateways:
            stretch(gateway, random.Random(seed))

        async def reseed() -> None:
            for _ in range(RESEEDINGS):
                await asyncio.sleep(RESEED_SECONDS)
                await third.upkeep.settlements._seeding.seed(house.tenant_id)

        await asyncio.gather(
            reseed(),
            *(
                Worker(house, ledger, seed * 100 + number).run(gateway)
                for number in range(WORKERS)
                for gateway in gateways
            ),
        )
        assert await check_books(house, second) == (ledger.tokens, ledger.settled)
        assert await second.upkeep.books.epoch(house.tenant_id) > RESEEDINGS
        assert ledger.admitted


async def test_what_a_dead_gateway_held_is_given_back(database: Database, valkey_url: str) -> None:
    house, ledger = await limited_house(database, valkey_url), Ledger()
    now = [time.monotonic()]
    async with house.gateway(clock=lambda: now[0]) as first, house.gateway() as second:
        async with house.gateway() as doomed:
            for _ in range(2):
                ledger.admit(await doomed.admit(house.request()))
            stretch(doomed, random.Random(1))
            dying = [asyncio.create_task(Worker(house, ledger, each).run(doomed)) for each in range(WORKERS)]
            living = [asyncio.create_task(Worker(house, ledger, 9).run(first, 20)) for _ in range(WORKERS)]
            await asyncio.sleep(0.15)
            await kill(dying)
            await asyncio.gather(*living)
            doomed.upkeep.requests.unbooked.clear()
        await first.upkeep.beat()
        lost = len(await house.rows("SELECT id FROM reservations"))
        assert lost >= 2
        await house.let_leases_run_out()
        assert await first.upkeep.reaper.reap() == 0
        now[0] += SETTINGS.lease_s
        assert await first.upkeep.reaper.reap() == lost
        await check_books(house, second)
        unknown = await house.rows("SELECT request_id FROM usage_records WHERE outcome = 'unknown'")
        assert len(unknown) == lost
