"""Ships a gateway's journal to PostgreSQL: reservations and ended requests, in the order of the journal.

Invariant: the journal forgets a record only after PostgreSQL has committed it or rejected it, and a record that is shipped
twice is stored once. No request waits for shipping.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import psycopg
import structlog

from loraplex.tenants.database import first_line
from loraplex.tenants.errors import DatabaseUnavailable, StoreUnavailable
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.journal.records import Admitted, Ended, JournalRecord
from loraplex.tenants.ledger.usage_ledger import LedgerWrite, UsageLedger

MAX_RECORDS = 500
PAUSE_S: Final = 0.1
"""Between two batches in the background: most requests end meanwhile, and are shipped once, with many others."""
REJECTED = (psycopg.DataError, psycopg.IntegrityError)
LOG = structlog.get_logger("loraplex.shipping")


@dataclass(frozen=True, slots=True)
class Shipped:
    """An ended request and how it was written; None if PostgreSQL rejected it."""

    ended: Ended
    write: LedgerWrite | None


@dataclass(eq=False)
class Shipping:
    """The shipping of one journal. `on_shipped` gets the ended requests of each batch, and `on_policy_outdated` each tenant
    of which a request was admitted under an outdated policy. Neither may wait.
    """

    journal: Journal
    ledger: UsageLedger
    gateway_id: UUID
    lease_s: float
    on_shipped: Callable[[Sequence[Shipped]], None]
    on_policy_outdated: Callable[[UUID], None]
    rejected: int = 0
    """How many records PostgreSQL has rejected; the journal keeps them as dead letters."""
    _shipped: int = 0
    _one_batch: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: "asyncio.Task[None] | None" = None
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _has_failed: bool = False

    def begin(self) -> None:
        """Ship in the background whatever is in the journal, until it is shipped or PostgreSQL fails. After a failure only
        `retry` begins: every request calls this, and each attempt reads and encodes a whole batch.
        """
        if not self._has_failed:
            self.retry()

    def retry(self) -> None:
        """As `begin`, also after a failure."""
        if self._running is None and not self._closing.is_set():
            self._running = asyncio.create_task(self._run())

    async def ship(self) -> None:
        """Ship all that is in the journal now. Raises `DatabaseUnavailable`, also after `close`."""
        until = self.journal.position
        while self._shipped < until:
            async with self._one_batch:
                if self._closing.is_set():
                    raise DatabaseUnavailable("the server is stopping")
                if self._shipped < until:
                    await self._ship_batch(until)

    async def close(self) -> None:
        """Wait for the batch in progress; what is behind it is not shipped."""
        self._closing.set()
        if self._running is not None:
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        try:
            while self._shipped < self.journal.position and not self._closing.is_set():
                await self.ship()
                await self._pause()
            self._has_failed = False
        except (StoreUnavailable, psycopg.Error) as error:
            if not self._has_failed:
                LOG.warning("the journal waits for PostgreSQL", reason=first_line(error))
            self._has_failed = True
        finally:
            self._running = None

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self._closing.wait()

    async def _ship_batch(self, until: int) -> None:
        """Ship the oldest records. Of one request, only the newest record counts."""
        records = await self.journal.unshipped(MAX_RECORDS)
        newest = {record.reservation.id: record for record in records}
        open_requests = [each for each in newest.values() if isinstance(each, Admitted)]
        ended = [each for each in newest.values() if isinstance(each, Ended)]
        await self._reserve(open_requests)
        shipped = await self._settle(ended)
        position = records[-1].position if records else until
        await self.journal.shipped(position)
        self._shipped = position
        self.on_shipped(shipped)

    async def _reserve(self, admitted: Sequence[Admitted]) -> None:
        results = await asyncio.gather(
            *(self.ledger.reserve(each.reservation, self.gateway_id, self.lease_s) for each in admitted),
            return_exceptions=True,
        )
        outdated = set[UUID]()
        for each, result in zip(admitted, results, strict=True):
            if isinstance(result, BaseException):
                await self._reject(each, result)
            elif result:
                outdated.add(each.reservation.tenant_id)
        for tenant_id in outdated:
            self.on_policy_outdated(tenant_id)

    async def _settle(self, ended: Sequence[Ended]) -> list[Shipped]:
        results = await asyncio.gather(
            *(self.ledger.settle(each.reservation, each.usage) for each in ended), return_exceptions=True
        )
        shipped = list[Shipped]()
        for each, result in zip(ended, results, strict=True):
            if isinstance(result, BaseException):
                await self._reject(each, result)
                shipped.append(Shipped(each, None))
            else:
                shipped.append(Shipped(each, result))
        return shipped

    async def _reject(self, record: JournalRecord, error: BaseException) -> None:
        """Keep a record that PostgreSQL rejects, so that it does not stop those behind it. Raises any other error."""
        if not isinstance(error, REJECTED):
            raise error
        self.rejected += 1
        reason = f"{type(error).__name__}: {first_line(error)}"
        LOG.error("PostgreSQL rejects a record", admission=str(record.reservation.id), reason=reason)
        await self.journal.reject(record.position, reason)
