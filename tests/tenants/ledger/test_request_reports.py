"""Requests by time and adapter, from the rollups that settlements and refusals write; and the latest failures."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.ledger.histograms import EMPTY
from loraplex.tenants.ledger.request_reports import (
    RequestSums,
    latest_failures,
    requests_by_adapter,
    requests_of_adapter,
    total,
)
from loraplex.tenants.models import NO_ID
from loraplex.tenants.models.usage import REST

DAY = datetime(2026, 11, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)


def refuse(url: str, tenant: UsingTenant, hour: datetime, code: str, requests: int) -> None:
    """Count refusals of the first key before its model was known."""
    key = next(iter(tenant.keys.values()))
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO request_rollups VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
            [tenant.id, hour, NO_ID, key, f"refused_{code}", requests, [*EMPTY], [*EMPTY]],
        )


def fail(url: str, tenant: UsingTenant, at: datetime, code: str, **values: Any) -> UUID:
    """Insert a request of the first key that got an error; refused, unless `values` say otherwise. Returns its id."""
    row = {
        "tenant_id": tenant.id,
        "id": uuid7_from(at),
        "at": at,
        "is_refused": True,
        "request_id": "mine",
        "key_id": next(iter(tenant.keys)),
        "code": code,
        "status": 404,
        "message": "No.",
        "omitted": 0,
        **values,
    }
    statement = f"INSERT INTO failed_requests ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})"
    with psycopg.connect(url) as connection:
        connection.execute(statement.encode(), [*row.values()])
    return UUID(str(row["id"]))


def seeded(url: str) -> UsingTenant:
    """Support has three requests at 00:30 and one at 05:30, coral one and the base model one; two refusals."""
    tenant = make_tenant(url)
    key = next(iter(tenant.keys.values()))
    one = Used(tenant.adapters["support"], key, DAY + HOUR / 2, ttft_ms=60)
    settle(
        url,
        tenant,
        [
            *(
                one,
                one,
                replace(one, outcome="failed", ttft_ms=None),
                replace(one, at=DAY + 5.5 * HOUR, ttft_ms=95),
            ),
            *(
                replace(one, adapter_id=tenant.adapters["coral"]),
                replace(one, adapter_id=None, outcome="aborted"),
            ),
        ],
    )
    refuse(url, tenant, DAY, "rate_limit_exceeded", 4)
    refuse(url, tenant, DAY + HOUR, "model_not_found", 2)
    return tenant


async def test_requests_by_period_and_adapter(database: Database) -> None:
    tenant, other = seeded(database.url), seeded(database.url)
    async with database.as_tenant(tenant.id) as session:
        rows = await requests_by_adapter(
            *(session, tenant.id),
            start=DAY - DAY_LONG,
            end=DAY + DAY_LONG,
            step=6 * HOUR,
            ranked_from=DAY,
            named=9,
        )
        assert not await requests_by_adapter(
            *(session, other.id), start=DAY, end=DAY + DAY_LONG, step=HOUR, ranked_from=DAY, named=9
        )
    found = {(row.start, row.adapter): row.sums for row in rows}
    support = found[DAY, "support"]
    assert (support.requests, support.failed, support.refused, support.errors) == (4, 1, 0, 1)
    assert support.ttft_ms(50) == 75 and sum(support.ttft) == 3
    base = found[DAY, None]
    assert (base.requests, base.failed, base.refused, base.limited) == (7, 0, 6, 4), "an abort is no error"
    assert {row.adapter_id for row in rows} == {NO_ID, *tenant.adapters.values()}


async def test_adapters_beyond_the_named_are_one(database: Database) -> None:
    tenant = seeded(database.url)
    async with database.as_tenant(tenant.id) as session:
        few, every = [
            await requests_by_adapter(
                *(session, tenant.id), start=DAY, end=DAY + DAY_LONG, step=HOUR, ranked_from=DAY, named=named
            )
            for named in (1, 9)
        ]
    assert {row.adapter_id for row in few} == {NO_ID, REST}
    assert total(row.sums for row in few) == total(row.sums for row in every)


async def test_the_requests_of_one_adapter(database: Database) -> None:
    tenant = seeded(database.url)
    async with database.as_tenant(tenant.id) as session:

        async def of(adapter_id: UUID | None, hours: int) -> RequestSums:
            return await requests_of_adapter(session, tenant.id, adapter_id, DAY, DAY + hours * HOUR)

        assert (await of(tenant.adapters["support"], 6)).requests == 4
        assert (await of(tenant.adapters["support"], 5)).requests == 3
        assert (await of(None, 1)).refused == 4
        assert await of(tenant.adapters["coral"], 0) == RequestSums()


async def test_failures_of_one_kind_are_one_row_and_the_newest_comes_first(database: Database) -> None:
    tenant, other = seeded(database.url), seeded(database.url)
    fail(database.url, tenant, DAY, "engine_unavailable", status=503, model="support")
    fail(database.url, tenant, DAY + HOUR, "model_not_found", omitted=3)
    newest = fail(database.url, tenant, DAY + 2 * HOUR, "model_not_found")
    fail(database.url, other, DAY + HOUR, "model_not_found")
    async with database.as_tenant(tenant.id) as session:
        found = await latest_failures(session, tenant.id, DAY, 5)
        assert await latest_failures(session, tenant.id, DAY + HOUR, 5) == found[:1]
        assert await latest_failures(session, tenant.id, DAY, 1) == found[:1]
    assert [(row.code, row.status, row.model, row.requests, row.key_name) for row in found] == [
        ("model_not_found", 404, None, 5, "k"),
        ("engine_unavailable", 503, "support", 1, "k"),
    ]
    assert (found[0].id, found[0].at) == (newest, DAY + 2 * HOUR)


DAY_LONG = 24 * HOUR
