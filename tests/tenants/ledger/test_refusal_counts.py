"""Refusals are counted by hour and code in bounded memory, and added to the rollups."""

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from tests.tenants.ledger.settled_rows import ADAPTER, AT, KEY, read, reservation, usage
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger import refusal_counts
from loraplex.tenants.ledger.histograms import EMPTY
from loraplex.tenants.ledger.refusal_counts import RefusalCounts, Refused
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import NO_ID

HOUR = AT.replace(minute=0, second=0, microsecond=0)
ROLLUPS = "SELECT hour, adapter_id, status, requests FROM request_rollups ORDER BY hour, adapter_id, status"


@pytest.fixture
async def ledger(database: Database) -> AsyncIterator[UsageLedger]:
    ledger = UsageLedger(database)
    yield ledger
    await ledger.close()


def refused(tenant_id: UUID, code: str = "rate_limit_exceeded", adapter: UUID | None = ADAPTER) -> Refused:
    return Refused(tenant_id=tenant_id, api_key_id=KEY, adapter_id=adapter, code=code)


async def test_counts_are_added_to_the_rollups_of_their_hours(
    database: Database, ledger: UsageLedger
) -> None:
    tenant_id, now = await make_tenant(database), [AT]
    counts = RefusalCounts(ledger.count_refusals, lambda: now[0])
    await ledger.settle(reservation(tenant_id), usage())
    for _ in range(2):
        counts.add(refused(tenant_id))
        counts.add(refused(tenant_id, "model_not_found", None))
        counts.add(refused(uuid4()))
        await counts.flush()
        await counts.flush()
    counts.add(refused(tenant_id))
    now[0] += timedelta(milliseconds=1)
    counts.add(refused(tenant_id))
    await counts.flush()
    assert await read(database, ROLLUPS) == [
        (HOUR, NO_ID, "refused_model_not_found", 2),
        (HOUR, ADAPTER, "completed", 1),
        (HOUR, ADAPTER, "refused_rate_limit_exceeded", 3),
        (HOUR + timedelta(hours=1), ADAPTER, "refused_rate_limit_exceeded", 1),
    ]
    buckets = await read(database, "SELECT DISTINCT ttft_buckets, gap_buckets FROM request_rollups")
    assert buckets == [([*EMPTY], [*EMPTY])]


async def test_counts_wait_while_postgresql_is_away() -> None:
    written: list[Mapping[tuple[datetime, Refused], int]] = []
    away = True

    async def write(counts: Mapping[tuple[datetime, Refused], int]) -> None:
        if away:
            raise DatabaseUnavailable("away")
        written.append(counts)

    counts = RefusalCounts(write, lambda: datetime(2026, 11, 30, 23, 59, tzinfo=UTC))
    one = refused(uuid4())
    for _ in range(2):
        counts.add(one)
        with pytest.raises(DatabaseUnavailable):
            await counts.flush()
    away = False
    await counts.flush()
    assert written == [{(HOUR, one): 2}]


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_counts, "MAX_COUNTS", 2)
    written: list[Mapping[tuple[datetime, Refused], int]] = []

    async def write(counts: Mapping[tuple[datetime, Refused], int]) -> None:
        written.append(counts)

    counts, known = RefusalCounts(write, lambda: AT), refused(uuid4())
    for each in (known, refused(uuid4()), refused(uuid4()), known):
        counts.add(each)
    await counts.flush()
    assert len(written[0]) == 2 and written[0][HOUR, known] == 2
