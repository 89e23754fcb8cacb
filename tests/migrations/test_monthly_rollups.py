"""The months of before are summed from their hours, new rows are added from then on, and it runs both ways."""

from typing import Any, Final, LiteralString

import psycopg
import pytest

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.migrations import downgrade, upgrade

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
HOURS: Final = """
    INSERT INTO tenants (id, name) VALUES ('00000000-0000-0000-0000-000000000001', 'acme');
    INSERT INTO usage_rollups
    SELECT '00000000-0000-0000-0000-000000000001', hour::timestamptz, adapter::uuid, gen_random_uuid(), price::uuid, currency, 1,
        1, 10, 100, amount
    FROM (VALUES
        ('2026-03-31T23:00Z', '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000009', 'USD', 1),
        ('2026-03-31T23:00Z', '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000009', 'USD', 2),
        ('2026-03-01T00:00Z', '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000009', 'USD', -7),
        ('2026-03-01T00:00Z', '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000009', 'EUR', 5),
        ('2026-03-01T00:00Z', '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000000', 'USD', 6),
        ('2026-04-01T00:00Z', '00000000-0000-0000-0000-000000000002', '00000000-0000-0000-0000-000000000009', 'USD', 8)
    ) AS hours (hour, adapter, price, currency, amount)
"""
ROW: Final = """
    INSERT INTO usage_records (id, tenant_id, api_key_id, adapter_id, outcome, uncached_tokens, cached_tokens,
        completion_tokens, currency, amount_pico, day, month, admitted_at)
    SELECT gen_random_uuid(), '00000000-0000-0000-0000-000000000001', gen_random_uuid(), NULL, 'completed', 1, 10, 100, 'USD',
        amount, 'd:2026-03-31', 'm:2026-03', at::timestamptz
    FROM (VALUES ('2026-03-31T23:59:59.999Z', 30), ('2026-04-01T02:00+02:00', 70)) AS made (at, amount)
"""
MONTHS: Final = """
    SELECT to_char(month AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), right(adapter_id::text, 1), right(price_version_id::text, 1),
        currency, requests, uncached_tokens, cached_tokens, completion_tokens, amount_pico::bigint
    FROM monthly_rollups ORDER BY month, 2, 3, 4
"""
MARCH, APRIL = "2026-03-01 00:00", "2026-04-01 00:00"
OF_BEFORE: Final = [
    (MARCH, "0", "0", "USD", 1, 1, 10, 100, 6),
    (MARCH, "0", "9", "EUR", 1, 1, 10, 100, 5),
    (MARCH, "0", "9", "USD", 3, 3, 30, 300, -4),
    (APRIL, "2", "9", "USD", 1, 1, 10, 100, 8),
]


def read(url: str, statement: LiteralString) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def test_months_of_before_are_the_sums_of_their_hours_and_go_on(empty_database_url: str) -> None:
    upgrade(empty_database_url, "0018")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(HOURS)
    upgrade(empty_database_url, "0019")
    assert read(empty_database_url, MONTHS) == OF_BEFORE
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("SET ROLE app_writer")
        connection.execute(ROW)
    assert read(empty_database_url, MONTHS) == [
        (MARCH, "0", "0", "USD", 2, 2, 20, 200, 36),
        *OF_BEFORE[1:3],
        (APRIL, "0", "0", "USD", 1, 1, 10, 100, 70),
        OF_BEFORE[3],
    ]
    downgrade(empty_database_url, "0018")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(ROW)
        assert connection.execute("SELECT to_regclass('monthly_rollups')").fetchone() == (None,)
