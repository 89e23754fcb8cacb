"""Usage of before becomes rows of the ledger with its rollups, without losing a token, and goes back the same way."""

from typing import Any
from uuid import UUID

import psycopg
import pytest

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.migrations import downgrade, upgrade
from loraplex.tenants.models import NO_ID

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
TENANT, ADAPTER = UUID(int=1), UUID(int=2)
FORMER = """
    INSERT INTO tenants (id, name) VALUES ('00000000-0000-0000-0000-000000000001', 'acme');
    INSERT INTO usage_records
    SELECT overlay(gen_random_uuid()::text placing month_start from 1)::uuid, '00000000-0000-0000-0000-000000000001',
        '00000000-0000-0000-0000-000000000003', adapter::uuid, version, digest, outcome, prompt, cached, completion, amount,
        'd:2026-03-31', 'm:2026-03', admitted::timestamptz, '2026-04-02T00:00Z'
    FROM (VALUES
        ('019d4216', NULL, NULL, NULL, 'completed', 10, 4, 5, 123, '2026-03-31T22:59:59.999Z'),
        ('019d4216', NULL, NULL, NULL, 'completed', 20, 0, 1, 7, '2026-03-31T22:00Z'),
        ('019d4216', NULL, NULL, NULL, 'aborted', 1, 1, 0, 1, '2026-03-31T22:00Z'),
        ('00000000', '00000000-0000-0000-0000-000000000002', 3, repeat('a', 64), 'unknown', 0, 0, 0, 0, '2026-03-31T23:00Z')
    ) AS former (month_start, adapter, version, digest, outcome, prompt, cached, completion, amount, admitted)
"""
FORMER_ROWS = "SELECT usage_records.* FROM usage_records ORDER BY request_id"
ROWS = """
    SELECT tableoid::regclass::text, outcome, uncached_tokens, cached_tokens, completion_tokens, amount_pico, currency,
        price_version_id, kind, day FROM usage_records ORDER BY admitted_at, outcome
"""
ROLLUPS = """
    SELECT hour AT TIME ZONE 'UTC', adapter_id, requests, uncached_tokens, cached_tokens, completion_tokens, amount_pico
    FROM usage_rollups ORDER BY hour
"""
STATUSES = "SELECT adapter_id, status, requests FROM request_rollups ORDER BY hour, status"


def read(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()


def test_usage_of_before_is_kept_both_ways(empty_database_url: str) -> None:
    upgrade(empty_database_url, "0012")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(FORMER)
    former = read(empty_database_url, FORMER_ROWS)
    upgrade(empty_database_url, "0013")
    march = ("usage_records_2026_03",)
    assert read(empty_database_url, ROWS) == [
        (*march, "aborted", 0, 1, 0, 1, "USD", None, "usage", "d:2026-03-31"),
        (*march, "completed", 20, 0, 1, 7, "USD", None, "usage", "d:2026-03-31"),
        (*march, "completed", 6, 4, 5, 123, "USD", None, "usage", "d:2026-03-31"),
        ("usage_records_default", "unknown", 0, 0, 0, 0, "USD", None, "usage", "d:2026-03-31"),
    ]
    rollups = read(empty_database_url, ROLLUPS)
    assert [(hour.isoformat(), *rest) for hour, *rest in rollups] == [
        ("2026-03-31T22:00:00", NO_ID, 3, 26, 5, 6, 131),
        ("2026-03-31T23:00:00", ADAPTER, 1, 0, 0, 0, 0),
    ]
    assert read(empty_database_url, STATUSES) == [
        (NO_ID, "aborted", 1),
        (NO_ID, "completed", 2),
        (ADAPTER, "unknown", 1),
    ]
    downgrade(empty_database_url, "0012")
    assert read(empty_database_url, FORMER_ROWS) == former


def test_a_row_of_the_ledger_is_never_changed(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'acme')")
        connection.execute(
            "INSERT INTO usage_records (id, tenant_id, api_key_id, outcome, uncached_tokens, cached_tokens,"
            " completion_tokens, currency, amount_pico, day, month, admitted_at)"
            " SELECT first_usage_id(now()), id, id, 'completed', 1, 0, 1, 'USD', 1, 'd:2026-11-21', 'm:2026-11', now()"
            " FROM tenants"
        )
        for change in ("UPDATE usage_records SET amount_pico = 0", "DELETE FROM usage_records"):
            with (
                pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="never changed"),
                connection.transaction(),
            ):
                connection.execute(change.encode())
