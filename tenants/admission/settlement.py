"""Settles what has ended: first in the books, durably, then in the counters. Each step is repeated until it is done.

Invariant: the counters are told only of what is in the books, and only where no seeding has told them already (README.md,
"Epochs"); so a gateway that dies at any point leaves nothing that the reaper cannot finish.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import msgspec
import psycopg
import structlog

from loraplex.tenants.admission.circuit_breaker import CircuitBreaker
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.in_flight import (
    InFlightReservations,
    MissingReservation,
    PendingCounterUpdate,
    PendingSettlement,
)
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import first_line
from loraplex.tenants.errors import DatabaseUnavailable, StoreUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import NOTHING_USED

AT_ONCE = 64
FINISH_SECONDS = 5.0
FINISH_PAUSE_SECONDS = 0.25
# Less than the counters remember an end for: until then a charge may be repeated.
REPEATABLE_SECONDS = 300.0
Item = TypeVar("Item")

LOG = structlog.get_logger("loraplex.settlements")


class SettlementQueue:
    """Of one gateway. `most_uncounted` bounds what is remembered while Valkey is away; beyond it tenants are seeded anew."""

    def __init__(
        self,
        books: UsageLedger,
        counters: Counters,
        seeding: CounterRebuild,
        breaker: CircuitBreaker,
        requests: InFlightReservations,
        most_uncounted: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._books = books
        self._counters = counters
        self._seeding = seeding
        self._breaker = breaker
        self._requests = requests
        self._most_uncounted = most_uncounted
        self._clock = clock
        self._busy: set[UUID] = set()
        self._telling: set[UUID] = set()

    async def settle(self, ended: PendingSettlement) -> None:
        """Tries once; what could not be done stays for `retry`."""
        self._requests.unbooked[ended.admission.id] = ended
        await self._book(ended)

    def abandon(self, tenant_id: UUID, request_id: UUID) -> None:
        """A refused request that the counters may still admit is released when they answer again."""
        self._remember(PendingCounterUpdate(tenant_id, request_id, NOTHING_USED))

    async def retry(self) -> None:
        """Once more whatever is not done, until a store fails again."""
        for waiting in _batches([*self._requests.unbooked.values()]):
            if not all(await asyncio.gather(*map(self._book, waiting))):
                return
        if self._breaker.is_open:
            return
        for uncounted in _batches([*self._requests.uncounted.values()]):
            await asyncio.gather(*map(self._count, uncounted))
        for tenant_id in [*self._requests.reseed]:
            await self._seeding.seed(tenant_id)
            self._requests.reseed.discard(tenant_id)

    async def finish(self) -> None:
        """Repeats what is not done for a while; usage that the books do not take even then is left in the log."""
        deadline = time.monotonic() + FINISH_SECONDS
        await self.retry()
        while self._requests.unbooked and time.monotonic() < deadline:
            await asyncio.sleep(FINISH_PAUSE_SECONDS)
            await self.retry()
        for ended in self._requests.unbooked.values():
            LOG.error("usage is lost", **msgspec.to_builtins(ended.row))

    async def _book(self, ended: PendingSettlement) -> bool:
        """False when PostgreSQL failed. What is on its way already is left to whoever sent it."""
        request_id = ended.admission.id
        if request_id in self._busy:
            return True
        self._busy.add(request_id)
        try:
            told = await self._written(ended)
        except (DatabaseUnavailable, psycopg.Error) as error:
            LOG.warning("usage waits for PostgreSQL", admission=str(request_id), reason=first_line(error))
            return False
        finally:
            self._busy.discard(request_id)
        self._requests.unbooked.pop(request_id, None)
        for each in told:
            self._remember(each)
        for each in told:
            await self._count(each)
        return True

    async def _written(self, ended: PendingSettlement) -> list[PendingCounterUpdate]:
        """What the counters are to be told, now that it is in the books."""
        admission, row = ended.admission, ended.row
        nothing = PendingCounterUpdate(
            admission.tenant_id, row.id, NOTHING_USED, hold=admission.hold, met=admission.degraded
        )
        try:
            booked = await self._books.settle(row)
            if row.outcome is None:
                return [replace(nothing, epoch=booked.epoch)]
            if booked.written:
                return [
                    replace(
                        nothing, actual=ended.actual, epoch=booked.epoch, unheld=MissingReservation.CHARGE
                    )
                ]
            if not await self._books.was_given_up(row.id):
                return [
                    replace(nothing, actual=ended.actual, epoch=booked.epoch, unheld=MissingReservation.SEED)
                ]
            LOG.warning("a request that was given up has ended", admission=str(row.id))
            late = await self._books.settle(replace(row, id=row.late_id))
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            LOG.error("no table takes this usage", admission=str(row.id), reason=type(error).__name__)
            return [nothing]
        unheld = MissingReservation.CHARGE if late.written else MissingReservation.SEED
        hold = replace(admission.hold, id=row.late_id)
        told = replace(nothing, id=hold.id, hold=hold)
        return [nothing, replace(told, actual=ended.actual, epoch=late.epoch, unheld=unheld)]

    async def _count(self, uncounted: PendingCounterUpdate) -> None:
        """What is on its way already is left to whoever sent it: told twice, it looks as if the counters had lost it."""
        self._remember(uncounted)
        if self._breaker.is_open or uncounted.id in self._telling:
            return
        self._telling.add(uncounted.id)
        try:
            await self._count_once(uncounted)
        finally:
            self._telling.discard(uncounted.id)

    async def _count_once(self, uncounted: PendingCounterUpdate) -> None:
        if uncounted.told_at is None:
            uncounted = replace(uncounted, told_at=self._clock())
            self._remember(uncounted)
        try:
            await self._tell(uncounted)
        except StoreUnavailable as error:
            if isinstance(error, ValkeyUnavailable):
                self._breaker.failed()
            LOG.warning("the counters wait for usage", admission=str(uncounted.id), reason=str(error))
            return
        if self._requests.uncounted.get(uncounted.id) is uncounted:
            del self._requests.uncounted[uncounted.id]

    async def _tell(self, uncounted: PendingCounterUpdate) -> None:
        """A seeding that read the books before the usage was written may still be on its way: then another one follows."""
        tenant_id, hold, booked = uncounted.tenant_id, uncounted.hold, uncounted.epoch
        charge = None
        if (
            hold is not None
            and uncounted.unheld is MissingReservation.CHARGE
            and self._is_repeatable(uncounted)
        ):
            charge = replace(hold, epoch=booked)
        settled = await self._counters.settle(tenant_id, uncounted.id, uncounted.actual, charge=charge)
        if hold is None or booked is None:
            return
        behind = settled.epoch < booked and (uncounted.met or hold.epoch != booked)
        unclear = settled.epoch <= booked and not settled.found and not charge
        if behind or (unclear and uncounted.unheld is not MissingReservation.LEAVE):
            await self._seed_beyond(tenant_id, booked)

    def _is_repeatable(self, uncounted: PendingCounterUpdate) -> bool:
        return uncounted.told_at is None or self._clock() - uncounted.told_at < REPEATABLE_SECONDS

    async def _seed_beyond(self, tenant_id: UUID, epoch: int) -> None:
        """One that was under way already may have read the books too early."""
        if await self._seeding.seed(tenant_id) <= epoch:
            await self._seeding.seed(tenant_id)

    def _remember(self, uncounted: PendingCounterUpdate) -> None:
        remembered = self._requests.uncounted
        remembered[uncounted.id] = uncounted
        if len(remembered) > self._most_uncounted:
            self._requests.reseed.update(each.tenant_id for each in remembered.values())
            remembered.clear()


def _batches(items: list[Item]) -> list[list[Item]]:
    return [items[first : first + AT_ONCE] for first in range(0, len(items), AT_ONCE)]
