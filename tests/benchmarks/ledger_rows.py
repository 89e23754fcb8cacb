"""Loads the usage ledger with millions of rows, as gateways would have written them: rows, rollups and totals agree.

Invariant: PostgreSQL makes the rows itself from a series of numbers, so that two loads of one shape are equal but for their time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from psycopg import AsyncConnection, sql

from loraplex.tenants.ledger.histograms import BUCKETS, TTFT_BOUNDS_MS
from loraplex.tenants.models import NO_ID
from loraplex.tenants.quotas.periods import period_start, periods_of

ROWS_AT_ONCE = 250_000
TENANTS = """
INSERT INTO tenants (id, name) SELECT md5('tenant' || n)::uuid, 'bench-' || n FROM generate_series(1, %(tenants)s) n
RETURNING id
"""
# Every hash of a row's number decides something else, so that tenants, adapters, keys and times are independent.
ROWS = """
INSERT INTO usage_records (
    id, tenant_id, api_key_id, adapter_id, outcome, uncached_tokens, cached_tokens, completion_tokens, price_version_id,
    currency, amount_pico, day, month, admitted_at, settled_at, ttft_ms, duration_ms
)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(hash, 1, 3) || '8'
        || substr(hash, 4, 15))::uuid,
    tenant_id, md5(tenant_id::text || 'key' || hashint4(n + 1) %% %(keys)s)::uuid,
    CASE WHEN n %% 3 > 0 THEN md5(tenant_id::text || 'adapter' || hashint4(n + 2) %% %(adapters)s)::uuid END,
    CASE WHEN n %% 50 = 0 THEN 'aborted' ELSE 'completed' END, 100 + n %% 900, n %% 100, 20 + n %% 200,
    md5('version' || n %% 2)::uuid, 'USD', (100 + n %% 900) * 100000 + (n %% 100) * 50000 + (20 + n %% 200) * 400000,
    to_char(at AT TIME ZONE 'UTC', '"d:"YYYY-MM-DD'), to_char(at AT TIME ZONE 'UTC', '"m:"YYYY-MM'), at, at,
    50 + n %% 500, 900 + n %% 5000
FROM (
    SELECT n, md5(n::text) AS hash, md5('tenant' || 1 + abs(hashint4(n)) %% %(tenants)s)::uuid AS tenant_id,
        %(first)s + (%(last)s - %(first)s) * (n::double precision / %(rows)s) AS at
    FROM generate_series(%(begin)s::integer, %(end)s::integer) n
) made
"""
# By the hour, as gateways write them: that decides how many pages of the table a report reads.
ROLLUPS = sql.SQL("""
INSERT INTO usage_rollups
SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, {no_id}), api_key_id, price_version_id,
    currency, count(*), sum(uncached_tokens), sum(cached_tokens), sum(completion_tokens), sum(amount_pico)
FROM usage_records GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 2
""").format(no_id=sql.Literal(NO_ID))
# Of the bounds, as many are below a time as its bucket's index says; times are whole milliseconds.
REQUESTS = sql.SQL("""
INSERT INTO request_rollups
SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, {no_id}), api_key_id, outcome, count(*),
    ARRAY[{counts}], array_fill(0::bigint, ARRAY[{buckets}])
FROM (SELECT *, width_bucket(ttft_ms - 1, ARRAY[{bounds}]) AS bucket FROM usage_records) r
GROUP BY 1, 2, 3, 4, 5 ORDER BY 2
""").format(
    no_id=sql.Literal(NO_ID),
    counts=sql.SQL(", ").join(
        sql.SQL("count(*) FILTER (WHERE bucket = {})").format(sql.Literal(index)) for index in range(BUCKETS)
    ),
    buckets=sql.Literal(BUCKETS),
    bounds=sql.SQL(", ").join(map(sql.Literal, TTFT_BOUNDS_MS)),
)
TOTALS = """
INSERT INTO usage_totals
SELECT tenant_id, level, subject_id, period, count(*), sum(uncached_tokens + cached_tokens + completion_tokens),
    sum((amount_pico + 999) / 1000)
FROM usage_records CROSS JOIN LATERAL (
    VALUES ('tenant', tenant_id), ('key', api_key_id), ('adapter', adapter_id)
) s (level, subject_id) CROSS JOIN LATERAL (VALUES (day), (month)) p (period)
WHERE subject_id IS NOT NULL GROUP BY 1, 2, 3, 4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerShape:
    """Rows in equal shares over `months` months, the current one included, and over all tenants, keys and adapters."""

    rows: int = 5_000_000
    months: int = 6
    tenants: int = 20
    keys: int = 3
    adapters: int = 4


def months_until(now: datetime, count: int) -> list[datetime]:
    """The first moments of `count` months, the oldest first; the last is that of `now`."""
    months = [period_start(periods_of(now).month)]
    while len(months) < count:
        months.insert(0, period_start(periods_of(months[0] - timedelta(days=1)).month))
    return months


async def load_ledger(url: str, shape: LedgerShape, progress: Callable[[str], None]) -> list[UUID]:
    """Load an empty ledger; return the tenants."""
    now = datetime.now(UTC)
    months = months_until(now, shape.months)
    async with await AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("SET ROLE app_operator")
        for month in months:
            await connection.execute("SELECT add_usage_partition('usage_records', %s)", (month,))
        cursor = await connection.execute(TENANTS, {"tenants": shape.tenants})
        tenants = [tenant_id for (tenant_id,) in await cursor.fetchall()]
        await connection.execute("SET ROLE app_writer")
        await connection.execute("SET work_mem = '256MB'")
        bounds = {"first": months[0], "last": now, "rows": shape.rows}
        counts = {"tenants": shape.tenants, "keys": shape.keys, "adapters": shape.adapters}
        for begin in range(1, shape.rows + 1, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE - 1, shape.rows)
            await connection.execute(ROWS, bounds | counts | {"begin": begin, "end": end})
            progress(f"{end:,} of {shape.rows:,} rows")
        for sums in (ROLLUPS, REQUESTS, TOTALS):
            await connection.execute(sums)
        await connection.execute("RESET ROLE")
        for table in ("usage_records", "usage_rollups", "request_rollups", "usage_totals"):
            await connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(table)))
    return tenants
