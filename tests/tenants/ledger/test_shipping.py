"""Shipping tries a failed PostgreSQL again once per retry, and ends with its gateway after the batch in progress."""

import asyncio
from uuid import uuid4

import pytest
from structlog.testing import capture_logs
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.ledger.journal.fixtures import reservation

from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger.shipping import MAX_RECORDS, Shipping
from loraplex.tenants.ledger.usage_ledger import UsageLedger


class SlowLedger(UsageLedger):
    """Stores reservations once `stored` is set."""

    def __init__(self) -> None:
        self.stored = asyncio.Event()
        self.asked = 0

    async def reserve(self, *_: object) -> bool:
        self.asked += 1
        await self.stored.wait()
        return False


class FailingLedger(UsageLedger):
    """Stores no reservation while `fails`."""

    def __init__(self) -> None:
        self.fails = True
        self.attempts = 0

    async def reserve(self, *_: object) -> bool:
        self.attempts += 1
        if self.fails:
            raise DatabaseUnavailable("refused")
        return False


async def test_requests_do_not_repeat_what_failed() -> None:
    """While PostgreSQL is away, an attempt per request would read and encode the waiting journal each time."""
    journal, ledger = MemoryJournal(), FailingLedger()
    shipping = Shipping(journal, ledger, uuid4(), 45.0, lambda _: None, lambda _: None)

    async def attempts(number: int) -> None:
        async with asyncio.timeout(60):
            while ledger.attempts < number:
                await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        assert ledger.attempts == number

    with capture_logs() as logs:
        for _ in range(20):
            await journal.admit(reservation())
            shipping.begin()
            await attempts(1)
        shipping.retry()
        await attempts(1 + 20)
    assert [each["event"] for each in logs] == ["the journal waits for PostgreSQL"]
    ledger.fails = False
    shipping.retry()
    await shipping.ship()
    await shipping.close()
    assert not await journal.unshipped(MAX_RECORDS)


async def test_a_gateway_that_stops_does_not_ship_a_long_journal() -> None:
    journal, ledger = MemoryJournal(), SlowLedger()
    shipping = Shipping(journal, ledger, uuid4(), 45.0, lambda _: None, lambda _: None)
    for _ in range(3 * MAX_RECORDS):
        await journal.admit(reservation())
    shipping.begin()
    async with asyncio.timeout(60):
        while ledger.asked < MAX_RECORDS:
            await asyncio.sleep(0.001)
    closing = asyncio.create_task(shipping.close())
    await asyncio.sleep(0)
    ledger.stored.set()
    await closing
    shipping.begin()
    with pytest.raises(DatabaseUnavailable, match="stopping"):
        await shipping.ship()
    assert len(await journal.unshipped(10 * MAX_RECORDS)) == 2 * MAX_RECORDS
