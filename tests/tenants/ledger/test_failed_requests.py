"""Failed requests: what a flood leaves of them, in memory and in the table."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from tests.tenants.ledger.settled_rows import AT, read
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger import failed_requests, statements
from loraplex.tenants.ledger.failed_requests import MAX_PER_MINUTE, FailedRequests, Failure
from loraplex.tenants.ledger.usage_ledger import UsageLedger

ROWS = "SELECT id, omitted, message FROM failed_requests ORDER BY id"


def failure(tenant_id: UUID) -> Failure:
    return Failure(
        tenant_id=tenant_id,
        id=uuid7(),
        at=AT,
        is_refused=True,
        request_id="mine",
        key_id="k",
        adapter_id=None,
        model=None,
        code="timeout",
        status=504,
        message="It took too long.",
    )


async def test_the_last_row_of_a_minute_counts_what_has_none(database: Database) -> None:
    tenant_id, ledger = await make_tenant(database), UsageLedger(database)
    kept = FailedRequests(ledger.keep_failed)
    first = [failure(tenant_id) for _ in range(MAX_PER_MINUTE)]
    for each in [*first, failure(uuid4())]:
        kept.add(each)
    await kept.flush()
    for _ in range(3):
        kept.add(failure(tenant_id))
    await kept.flush()
    kept.add(replace(failure(tenant_id), at=AT + timedelta(minutes=1)))
    await kept.flush()
    rows = await read(database, ROWS)
    assert [omitted for _, omitted, _ in rows] == [0] * (MAX_PER_MINUTE - 1) + [3, 0]
    await ledger.close()


async def test_a_tenant_keeps_its_newest_rows(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant_id, ledger = await make_tenant(database), UsageLedger(database)
    other = await make_tenant(database, "other")
    bound = f"OFFSET {failed_requests.MAX_KEPT} "
    monkeypatch.setattr(statements, "KEEP_FAILED", statements.KEEP_FAILED.replace(bound, "OFFSET 2 "))
    added = [failure(tenant_id) for _ in range(5)]
    await ledger.keep_failed([failure(other)])
    for each in added:
        await ledger.keep_failed([each])
        await ledger.keep_failed([each])
    ids = await read(database, f"SELECT id FROM failed_requests WHERE tenant_id = '{tenant_id}' ORDER BY id")
    assert [each for (each,) in ids] == [each.id for each in added[-2:]]
    await ledger.close()


async def test_rows_wait_for_postgresql_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_requests, "MAX_PENDING", 2)
    away, written = True, list[Failure]()

    async def write(failures: Sequence[Failure]) -> None:
        if away:
            raise DatabaseUnavailable("away")
        written.extend(failures)

    kept, tenant_id = FailedRequests(write), uuid4()
    for _ in range(4):
        kept.add(failure(tenant_id))
    kept.add(failure(uuid4()))
    with pytest.raises(DatabaseUnavailable):
        await kept.flush()
    away = False
    await kept.flush()
    assert [each.omitted for each in written] == [0, 2]
