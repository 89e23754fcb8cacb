"""Failed requests: what a flood leaves of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from tests.tenants.ledger.settled_rows import AT, read
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger import failed_requests
from loraplex.tenants.ledger.failed_requests import (
    MAX_OF_KIND,
    MAX_PER_MINUTE,
    ROWS_AT_ONCE,
    FailedRequests,
    Failure,
    Refused,
)
from loraplex.tenants.ledger.usage_ledger import UsageLedger

ROWS = "SELECT id, omitted, message FROM failed_requests ORDER BY id"


async def count_none(counts: Mapping[Refused, int]) -> None:
    assert not counts


def failure(tenant_id: UUID) -> Failure:
    return Failure(
        tenant_id=tenant_id,
        id=uuid7(),
        at=AT,
        is_refused=True,
        request_id="mine",
        key_id="k",
        api_key_id=None,
        adapter_id=None,
        model=None,
        code="timeout",
        status=504,
        message="It took too long.",
    )


async def test_the_last_row_of_a_minute_counts_what_has_none(database: Database) -> None:
    tenant_id, ledger = await make_tenant(database), UsageLedger(database)
    kept = FailedRequests(ledger.keep_failed, ledger.count_refusals)
    for each in [failure(tenant_id) for _ in range(MAX_OF_KIND)] + [failure(uuid4())]:
        kept.add(each)
    await kept.flush()
    for _ in range(3):
        kept.add(failure(tenant_id))
    await kept.flush()
    kept.add(replace(failure(tenant_id), at=AT + timedelta(minutes=1)))
    await kept.flush()
    rows = await read(database, ROWS)
    assert [omitted for _, omitted, _ in rows] == [0] * (MAX_OF_KIND - 1) + [3, 0]
    await ledger.close()


async def test_a_flood_of_one_key_and_code_hides_no_other() -> None:
    written, tenant_id = list[Failure](), uuid4()

    async def write(failures: Sequence[Failure]) -> None:
        written.extend(failures)

    kept = FailedRequests(write, count_none)
    for _ in range(100):
        kept.add(failure(tenant_id))
    kept.add(replace(failure(tenant_id), code="internal_error"))
    for number in range(MAX_PER_MINUTE):
        kept.add(replace(failure(tenant_id), key_id=f"key-{number}"))
    kept.add(failure(tenant_id))
    await kept.flush()
    of_flood = [each.omitted for each in written if (each.key_id, each.code) == ("k", "timeout")]
    assert of_flood == [0] * (MAX_OF_KIND - 1) + [101 - MAX_OF_KIND]
    assert written[MAX_OF_KIND].code == "internal_error" and written[MAX_OF_KIND].omitted == 0
    assert len(written) == MAX_PER_MINUTE


async def test_rows_wait_for_postgresql_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_requests, "MAX_PENDING", 2)
    away, written = True, list[Failure]()

    async def write(failures: Sequence[Failure]) -> None:
        if away:
            raise DatabaseUnavailable("away")
        written.extend(failures)

    kept, tenant_id = FailedRequests(write, count_none), uuid4()
    for _ in range(4):
        kept.add(failure(tenant_id))
    kept.add(failure(uuid4()))
    with pytest.raises(DatabaseUnavailable):
        await kept.flush()
    away = False
    await kept.flush()
    assert [each.omitted for each in written] == [0, 2]


async def test_failed_flushes_neither_lose_rows_nor_exceed_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 3 * ROWS_AT_ONCE
    monkeypatch.setattr(failed_requests, "MAX_PENDING", bound)
    kept, tried, fails_at = FailedRequests(lambda rows: write(rows), count_none), list[list[UUID]](), 1

    async def write(failures: Sequence[Failure]) -> None:
        tried.append([each.id for each in failures])
        for _ in range(bound):
            kept.add(failure(uuid4()))
        if len(tried) >= fails_at:
            raise DatabaseUnavailable("away")

    for _ in range(10):
        kept.add(failure(uuid4()))
        with pytest.raises(DatabaseUnavailable):
            await kept.flush()
    assert {len(each) for each in tried[1:]} == {ROWS_AT_ONCE}, "a batch does not grow"
    tried.clear()
    fails_at = 2
    with pytest.raises(DatabaseUnavailable):
        await kept.flush()
    assert (
        len(kept._pending) == bound and not {*tried[0]} & {*kept._pending} and {*tried[1]} <= {*kept._pending}
    )


async def test_what_postgresql_rejects_holds_up_no_other(database: Database) -> None:
    tenant_id, ledger = await make_tenant(database), UsageLedger(database)
    kept = FailedRequests(ledger.keep_failed, ledger.count_refusals)
    kept.add(replace(failure(tenant_id), code="nul\0", message="nul\0", api_key_id=uuid4()))
    await kept.flush()
    assert await read(database, ROWS) == []
    kept.add(replace(failure(tenant_id), api_key_id=uuid4()))
    await kept.flush()
    assert len(await read(database, ROWS)) == 1
    assert await read(database, "SELECT status FROM request_rollups") == [("refused_timeout",)]
    await ledger.close()
