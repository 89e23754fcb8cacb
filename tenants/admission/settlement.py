"""Settles ended requests: durably in the ledger, then in the counters. Each step is repeated until it is done.

Invariant: the counters are updated only with usage that is in the ledger, and only if no rebuild has included it (README.md,
"Epochs"). Whatever a gateway leaves when it dies, the reaper can finish.
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

from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.in_flight import (
    InFlightReservations,
    MissingReservation,
    PendingCounterUpdate,
    PendingSettlement,
)
from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import first_line
from loraplex.tenants.errors import DatabaseUnavailable, StoreUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger, usage_row

AT_ONCE = 64
FINISH_SECONDS = 5.0
FINISH_PAUSE_SECONDS = 0.25
# A charge may be repeated for so long: less than the time for which the counters remember an end.
REPEATABLE_SECONDS = 300.0
Item = TypeVar("Item")

LOG = structlog.get_logger("loraplex.settlements")


class SettlementQueue:
    """The settlements of one gateway. Beyond `max_pending_updates` waiting counter updates, tenants are rebuilt instead."""

    def __init__(
        self,
        ledger: UsageLedger,
        counters: Counters,
        counter_rebuild: CounterRebuild,
        breaker: CircuitBreaker,
        requests: InFlightReservations,
        max_pending_updates: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._counters = counters
        self._counter_rebuild = counter_rebuild
        self._breaker = breaker
        self._requests = requests
        self._max_pending_updates = max_pending_updates
        self._clock = clock
        self._busy: set[UUID] = set()
        self._updating: set[UUID] = set()

    async def settle(self, pending: PendingSettlement) -> None:
        """Try once; what failed is left to `retry`."""
        self._requests.unsettled[pending.reservation.id] = pending
        await self._write(pending)

    def cancel_later(self, tenant_id: UUID, request_id: UUID) -> None:
        """Cancel a refused request, which the counters may still admit, once they are available again."""
        self._remember(PendingCounterUpdate(tenant_id, request_id))

    async def retry(self) -> None:
        """Repeat every step that is not done, until a store fails again."""
        for waiting in _batches([*self._requests.unsettled.values()]):
            if not all(await asyncio.gather(*map(self._write, waiting))):
                return
        if self._breaker.is_open:
            return
        for updates in _batches([*self._requests.pending_counter_updates.values()]):
            await asyncio.gather(*map(self._send_update, updates))
        for tenant_id in [*self._requests.to_rebuild]:
            await self._counter_rebuild.rebuild(tenant_id)
            self._requests.to_rebuild.discard(tenant_id)

    async def finish(self) -> None:
        """Repeat for `FINISH_SECONDS`; usage that is not in the ledger then is logged."""
        deadline = time.monotonic() + FINISH_SECONDS
        await self.retry()
        while self._requests.unsettled and time.monotonic() < deadline:
            await asyncio.sleep(FINISH_PAUSE_SECONDS)
            await self.retry()
        for pending in self._requests.unsettled.values():
            LOG.error("usage is lost", **msgspec.to_builtins(usage_row(pending.reservation, pending.usage)))

    async def _write(self, pending: PendingSettlement) -> bool:
        """Write one settlement; False if PostgreSQL failed. One that is being written already is skipped."""
        request_id = pending.reservation.id
        if request_id in self._busy:
            return True
        self._busy.add(request_id)
        try:
            updates = await self._settle_in_ledger(pending)
        except (DatabaseUnavailable, psycopg.Error) as error:
            LOG.warning("usage waits for PostgreSQL", admission=str(request_id), reason=first_line(error))
            return False
        finally:
            self._busy.discard(request_id)
        self._requests.unsettled.pop(request_id, None)
        for each in updates:
            self._remember(each)
        for each in updates:
            await self._send_update(each)
        return True

    async def _settle_in_ledger(self, pending: PendingSettlement) -> list[PendingCounterUpdate]:
        """Write the usage to the ledger and return the counter updates that follow."""
        reservation, usage = pending.reservation, pending.usage
        unused = PendingCounterUpdate(reservation.tenant_id, reservation.id, reservation)
        try:
            written = await self._ledger.settle(reservation, usage)
            update = replace(unused, usage=usage, epoch=written.epoch)
            if usage.outcome is None:
                return [update]
            if written.written:
                return [replace(update, if_missing=MissingReservation.CHARGE)]
            if not await self._ledger.has_unknown_outcome(reservation.id):
                return [replace(update, if_missing=MissingReservation.REBUILD)]
            LOG.warning("a request that was given up has ended", admission=str(reservation.id))
            late = reservation.late()
            written = await self._ledger.settle(late, usage)
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            LOG.error(
                "PostgreSQL rejects this usage", admission=str(reservation.id), reason=type(error).__name__
            )
            return [unused]
        if_missing = MissingReservation.CHARGE if written.written else MissingReservation.REBUILD
        update = PendingCounterUpdate(late.tenant_id, late.id, late, usage, written.epoch, if_missing)
        return [unused, update]

    async def _send_update(self, update: PendingCounterUpdate) -> None:
        """Send an update unless it is being sent: a second one finds no reservation, as if the counters had lost it."""
        self._remember(update)
        if self._breaker.is_open or update.id in self._updating:
            return
        self._updating.add(update.id)
        try:
            await self._send_update_once(update)
        finally:
            self._updating.discard(update.id)

    async def _send_update_once(self, update: PendingCounterUpdate) -> None:
        if update.updated_at is None:
            update = replace(update, updated_at=self._clock())
            self._remember(update)
        try:
            await self._update(update)
        except StoreUnavailable as error:
            if isinstance(error, ValkeyUnavailable):
                self._breaker.failed()
            LOG.warning("the counters wait for usage", admission=str(update.id), reason=str(error))
            return
        if self._requests.pending_counter_updates.get(update.id) is update:
            del self._requests.pending_counter_updates[update.id]

    async def _update(self, update: PendingCounterUpdate) -> None:
        """Update the counters. A rebuild that read the ledger before the usage was written may be in progress: then
        another one follows."""
        tenant_id, reservation, epoch = update.tenant_id, update.reservation, update.epoch
        charge = None
        if (
            reservation is not None
            and update.if_missing is MissingReservation.CHARGE
            and self._is_repeatable(update)
        ):
            charge = replace(reservation, epoch=epoch)
        settled = await self._counters.settle(tenant_id, update.id, update.usage, charge=charge)
        if reservation is None or epoch is None:
            return
        # Counters that did not admit the request may not have its epoch yet.
        behind = settled.epoch < epoch and (reservation.degraded or reservation.epoch != epoch)
        unclear = settled.epoch <= epoch and not settled.found and not charge
        if behind or (unclear and update.if_missing is not MissingReservation.IGNORE):
            await self._rebuild_beyond(tenant_id, epoch)

    def _is_repeatable(self, update: PendingCounterUpdate) -> bool:
        return update.updated_at is None or self._clock() - update.updated_at < REPEATABLE_SECONDS

    async def _rebuild_beyond(self, tenant_id: UUID, epoch: int) -> None:
        """Rebuild under a later epoch. A rebuild already in progress may have read the ledger too early."""
        if await self._counter_rebuild.rebuild(tenant_id) <= epoch:
            await self._counter_rebuild.rebuild(tenant_id)

    def _remember(self, update: PendingCounterUpdate) -> None:
        remembered = self._requests.pending_counter_updates
        remembered[update.id] = update
        if len(remembered) > self._max_pending_updates:
            self._requests.to_rebuild.update(each.tenant_id for each in remembered.values())
            remembered.clear()


def _batches(items: list[Item]) -> list[list[Item]]:
    return [items[first : first + AT_ONCE] for first in range(0, len(items), AT_ONCE)]
