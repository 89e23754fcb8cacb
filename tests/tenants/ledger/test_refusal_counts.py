"""Refusals are counted by hour and code in bounded memory, and added to the rollups."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest
from tests.tenants.ledger.settled_rows import ADAPTER, AT, KEY, read, reservation, usage
from tests.tenants.ledger.test_failed_requests import failure
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger import failed_requests
from loraplex.tenants.ledger.failed_requests import FailedRequests, Failure, Refused
from loraplex.tenants.ledger.histograms import EMPTY
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import NO_ID

HOUR = AT.replace(minute=0, second=0, microsecond=0)
ROLLUPS = "SELECT hour, adapter_id, status, requests FROM request_rollups ORDER BY hour, adapter_id, status"


@pytest.fixture
async def ledger(database: Database) -> AsyncIterator[UsageLedger]:
    ledger = UsageLedger(database)
    yield ledger
    await ledger.close()


def refused(
    tenant_id: UUID, code: str = "rate_limit_exceeded", adapter: UUID | None = ADAPTER, at: datetime = AT
) -> Failure:
    return replace(failure(tenant_id), at=at, api_key_id=KEY, adapter_id=adapter, code=code)


async def list_none(failures: Sequence[Failure]) -> None:
    """The rows are another test's."""


async def test_counts_are_added_to_the_rollups_of_their_hours(
    database: Database, ledger: UsageLedger
) -> None:
    tenant_id = await make_tenant(database)
    counts = FailedRequests(list_none, ledger.count_refusals)
    await ledger.settle(reservation(tenant_id), usage())
    for _ in range(2):
        counts.add(refused(tenant_id))
        counts.add(refused(tenant_id, "model_not_found", None))
        counts.add(refused(uuid4()))
        counts.add(replace(refused(tenant_id), api_key_id=None))
        counts.add(replace(refused(tenant_id), is_refused=False))
        await counts.flush()
        await counts.flush()
    counts.add(refused(tenant_id))
    counts.add(refused(tenant_id, at=AT + timedelta(milliseconds=1)))
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
    written: list[Mapping[Refused, int]] = []
    away = True

    async def count(counts: Mapping[Refused, int]) -> None:
        if away:
            raise DatabaseUnavailable("away")
        written.append(counts)

    counts, one = FailedRequests(list_none, count), refused(uuid4())
    for _ in range(2):
        counts.add(one)
        with pytest.raises(DatabaseUnavailable):
            await counts.flush()
    away = False
    await counts.flush()
    assert written == [{Refused(HOUR, one.tenant_id, KEY, ADAPTER, "refused_rate_limit_exceeded"): 2}]


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_requests, "MAX_COUNTS", 2)
    written: list[Mapping[Refused, int]] = []

    async def count(counts: Mapping[Refused, int]) -> None:
        written.append(counts)

    counts, known = FailedRequests(list_none, count), refused(uuid4())
    for each in (known, refused(uuid4()), refused(uuid4()), known):
        counts.add(each)
    await counts.flush()
    assert len(written[0]) == 2 and sorted(written[0].values()) == [1, 2]
