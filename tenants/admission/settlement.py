"""Settles ended requests: durably in the journal, then in the counters at once, then in the ledger by shipping.

Invariant: the counters count a request once: when its end is in the journal and they have its reservation, or when its usage is
in the ledger and no rebuild has included it (README.md, "Epochs"). What a gateway leaves when it dies, the next one ships.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from uuid import UUID

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
from loraplex.tenants.errors import CountersNewer, StoreUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.shipping import Shipped
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation

AT_ONCE = 64
# A charge may be repeated for so long: less than the time for which the counters remember an end.
REPEATABLE_SECONDS = 300.0

LOG = structlog.get_logger("loraplex.settlements")


@dataclass(eq=False)
class SettlementQueue:
    """The settlements of one gateway. Beyond `max_pending_updates` waiting counter updates, tenants are rebuilt instead."""

    journal: Journal
    counters: Counters
    counter_rebuild: CounterRebuild
    breaker: CircuitBreaker
    requests: InFlightReservations
    max_pending_updates: int
    clock: Callable[[], float] = time.monotonic
    _not_in_journal: dict[UUID, PendingSettlement] = field(default_factory=dict)
    _updating: set[UUID] = field(default_factory=set)
    _sending: set["asyncio.Task[None]"] = field(default_factory=set)

    async def settle(self, pending: PendingSettlement, *, repeated: bool = False) -> None:
        """Return once the end is durable in the journal, and the counters know it if they could be reached: before the ledger has
        the usage, if they have the reservation.

        Raises `JournalUnavailable`; then `retry` repeats it.
        """
        requests, reservation = self.requests, pending.reservation
        if not repeated:
            requests.unsettled[reservation.id] = pending
        try:
            is_in_journal = await self.journal.end(reservation.id, pending.usage)
        except BaseException:
            self._not_in_journal[reservation.id] = pending
            raise
        if not is_in_journal and pending.usage.outcome is None:
            # Its admission was cancelled before the journal had it.
            requests.unsettled.pop(reservation.id, None)
            self.cancel_later(reservation.tenant_id, reservation.id)
            return
        # Usage that the journal did not write now is in it since a call that failed, and perhaps shipped.
        if reservation.id not in requests.unsettled or self.breaker.is_open:
            return
        pending.updated_at, began = self.clock(), self.breaker.clock()
        try:
            settled = await self.counters.settle_early(reservation, pending.usage)
        except CountersNewer:
            return
        except ValkeyUnavailable as error:
            self.breaker.failed(began)
            LOG.warning("the counters wait for usage", admission=str(reservation.id), reason=str(error))
            return
        if requests.unsettled.get(reservation.id) is not pending:
            return
        # They replied, so the update that follows shipping is the first that could charge.
        pending.updated_at = None
        if settled.found:
            del requests.unsettled[reservation.id]
            requests.early[reservation.id] = settled.epoch

    def withdraw_later(self, reservation: Reservation) -> None:
        """End a reservation unused with the next `retry`: the journal does not answer now."""
        pending = PendingSettlement(reservation, NOTHING_USED)
        self.requests.unsettled[reservation.id] = self._not_in_journal[reservation.id] = pending

    def cancel_later(self, tenant_id: UUID, request_id: UUID) -> None:
        """Cancel a refused request, which the counters may still admit, once they are available again."""
        self._remember(PendingCounterUpdate(tenant_id, request_id))

    def shipped(self, ends: Sequence[Shipped]) -> None:
        """Update the counters in the background with ends that are in the ledger now, where they do not know them."""
        updates = [update for each in ends if (update := self._update_after(each)) is not None]
        if not updates:
            return
        for update in updates:
            self._remember(update)
        sending = asyncio.create_task(self._send(updates))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def sent(self) -> None:
        """Wait for the updates that are being sent."""
        while self._sending:
            await asyncio.wait([*self._sending])

    async def write_ends(self) -> None:
        """Write the ends that the journal could not write. Raises `JournalUnavailable`."""
        for request_id in [*self._not_in_journal]:
            await self.settle(self._not_in_journal.pop(request_id), repeated=True)

    async def retry(self) -> None:
        """Repeat every step that is not done, until a store fails again."""
        await self.write_ends()
        if self.breaker.is_open:
            return
        await self._send([*self.requests.pending_counter_updates.values()])
        for tenant_id in [*self.requests.to_rebuild]:
            with suppress(CountersNewer):
                await self.counter_rebuild.rebuild(tenant_id)
            self.requests.to_rebuild.discard(tenant_id)

    def _update_after(self, shipped: Shipped) -> PendingCounterUpdate | None:
        """The update of the counters that follows an end in the ledger; None if they were updated under the same epoch."""
        reservation, usage, write = shipped.ended.reservation, shipped.ended.usage, shipped.write
        early = self.requests.early.pop(reservation.id, None)
        pending = self.requests.unsettled.pop(reservation.id, None)
        if write is None and early is None:
            return PendingCounterUpdate(reservation.tenant_id, reservation.id, reservation)
        if write is None or (write.epoch or 0) < (reservation.epoch or 0):
            # The counters know usage that the ledger lacks, or the ledger was restored from a backup.
            self.requests.to_rebuild.add(reservation.tenant_id)
            return None
        if early is not None and early == write.epoch:
            return None
        # A root that moved meanwhile: counters of that epoch know the request, if at all, for the new one.
        root = None if write.limit_root == reservation.request.api_key_id else write.limit_root
        if root != reservation.request.limit_root:
            reservation = replace(
                reservation, request=replace(reservation.request, limit_root=root, subjects=())
            )
        updated_at = None if pending is None else pending.updated_at
        update = PendingCounterUpdate(
            reservation.tenant_id, reservation.id, reservation, usage, write.epoch, updated_at=updated_at
        )
        if usage.outcome is None:
            return update
        return replace(
            update, if_missing=MissingReservation.CHARGE if write.written else MissingReservation.REBUILD
        )

    async def _send(self, updates: Sequence[PendingCounterUpdate]) -> None:
        for first in range(0, len(updates), AT_ONCE):
            await asyncio.gather(*map(self._send_update, updates[first : first + AT_ONCE]))

    async def _send_update(self, update: PendingCounterUpdate) -> None:
        """Send an update unless it is being sent: a second one finds no reservation, as if the counters had lost it."""
        self._remember(update)
        if self.breaker.is_open or update.id in self._updating:
            return
        self._updating.add(update.id)
        try:
            await self._send_update_once(update)
        finally:
            self._updating.discard(update.id)

    async def _send_update_once(self, update: PendingCounterUpdate) -> None:
        if update.updated_at is None:
            update = replace(update, updated_at=self.clock())
            self._remember(update)
        began = self.breaker.clock()
        try:
            # Newer counters learn of this end from the ledger.
            with suppress(CountersNewer):
                await self._update(update)
        except StoreUnavailable as error:
            if isinstance(error, ValkeyUnavailable):
                self.breaker.failed(began)
            LOG.warning("the counters wait for usage", admission=str(update.id), reason=str(error))
            return
        if self.requests.pending_counter_updates.get(update.id) is update:
            del self.requests.pending_counter_updates[update.id]

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
        settled = await self.counters.settle(tenant_id, update.id, update.usage, charge=charge)
        if reservation is None or epoch is None:
            return
        # Counters that did not admit the request may not have its epoch yet.
        behind = settled.epoch < epoch and (reservation.degraded or reservation.epoch != epoch)
        unclear = settled.epoch <= epoch and not settled.found and not charge
        if behind or (unclear and update.if_missing is not MissingReservation.IGNORE):
            await self._rebuild_beyond(tenant_id, epoch)

    def _is_repeatable(self, update: PendingCounterUpdate) -> bool:
        return update.updated_at is None or self.clock() - update.updated_at < REPEATABLE_SECONDS

    async def _rebuild_beyond(self, tenant_id: UUID, epoch: int) -> None:
        """Rebuild under a later epoch. A rebuild already in progress may have read the ledger too early."""
        if await self.counter_rebuild.rebuild(tenant_id) <= epoch:
            await self.counter_rebuild.rebuild(tenant_id)

    def _remember(self, update: PendingCounterUpdate) -> None:
        remembered = self.requests.pending_counter_updates
        remembered[update.id] = update
        if len(remembered) > self.max_pending_updates:
            self.requests.to_rebuild.update(each.tenant_id for each in remembered.values())
            remembered.clear()
