"""Loads the usage ledger with millions of rows, as gateways would have written them: rows, rollups and totals agree.

Invariant: PostgreSQL makes the rows itself from a series of numbers, so that two loads of one shape are equal but for their time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import md5
from typing import Any, Final
from uuid import UUID

from psycopg import AsyncConnection, sql

from loraplex.platform.bench.report import available_cores
from loraplex.tenants.ledger.histograms import BUCKETS, TTFT_BOUNDS_MS
from loraplex.tenants.models import NO_ID
from loraplex.tenants.periods import period_end, period_start, periods_of

TABLES: Final = ["usage_records", "usage_rollups", "request_rollups", "usage_totals"]
LARGEST_PERCENT: Final = 20
"""The share of the first tenant where there are more than five; the others have equal shares."""
TENANTS = """
INSERT INTO tenants (id, name) SELECT md5('tenant' || n)::uuid, 'bench-' || n FROM generate_series(1, %(tenants)s) n
"""
PRICES = """
WITH card AS (INSERT INTO rate_cards (scope, currency) VALUES ('all', 'USD') RETURNING id)
INSERT INTO price_versions (id, rate_card_id, version, prompt, cached_prompt, completion, effective)
SELECT v.id, card.id, n, 100000, 50000, 400000, tstzrange(
    CASE n WHEN 1 THEN %(repriced)s - interval '4 years' ELSE %(repriced)s END, CASE n WHEN 1 THEN %(repriced)s END
)
FROM card, unnest(%(versions)s::uuid[]) WITH ORDINALITY AS v (id, n)
"""
# Every hash of a row's number decides something else, so that tenants, adapters, keys and times are independent.
ROWS = """
INSERT INTO usage_records (
    id, tenant_id, api_key_id, adapter_id, outcome, uncached_tokens, cached_tokens, completion_tokens, price_version_id,
    currency, amount_pico, day, month, admitted_at, settled_at, ttft_ms, duration_ms
)
SELECT (lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(hash, 1, 3) || '8'
        || substr(hash, 4, 15))::uuid,
    (%(tenant_ids)s::uuid[])[1 + tenant],
    (%(key_ids)s::uuid[])[1 + tenant * %(keys)s + (hashint4(n + 1) & 1048575) %% %(keys)s],
    CASE WHEN n %% 3 > 0 THEN
        (%(adapter_ids)s::uuid[])[1 + tenant * %(adapters)s + (hashint4(n + 2) & 1048575) %% %(adapters)s]
    END,
    CASE n %% 100 WHEN 0 THEN 'aborted' WHEN 50 THEN 'failed' ELSE 'completed' END,
    100 + n %% 900, n %% 100, 20 + n %% 200, %(price_version_id)s, 'USD',
    (100 + n %% 900) * 100000 + (n %% 100) * 50000 + (20 + n %% 200) * 400000,
    to_char(at AT TIME ZONE 'UTC', '"d:"YYYY-MM-DD'), %(month)s, at, at, 50 + n %% 500, 900 + n %% 5000
FROM (
    SELECT n, md5(n::text) AS hash, %(first)s + (%(last)s - %(first)s) * (n::double precision / %(rows)s) AS at,
        CASE WHEN (hashint4(n) & 1048575) %% 100 < %(percent)s THEN 0
            ELSE 1 + (hashint4(n + 3) & 1048575) %% greatest(%(tenants)s - 1, 1) END AS tenant
    FROM generate_series(%(begin)s::integer, %(end)s::integer) n
) made
"""
# By the hour, as gateways write them: that decides how many pages of the table a report reads.
_OF_MONTH: Final = "id >= first_usage_id(%(start)s) AND id < first_usage_id(%(until)s)"
ROLLUPS = sql.SQL(f"""
INSERT INTO usage_rollups
SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, {{no_id}}), api_key_id, price_version_id,
    currency, count(*), sum(uncached_tokens), sum(cached_tokens), sum(completion_tokens), sum(amount_pico)
FROM usage_records WHERE {_OF_MONTH} GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 2
""").format(no_id=sql.Literal(NO_ID))
# Of the bounds, as many are below a time as its bucket's index says; times are whole milliseconds.
REQUESTS = sql.SQL(f"""
INSERT INTO request_rollups
SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, {{no_id}}), api_key_id, outcome, count(*),
    ARRAY[{{counts}}], array_fill(0::bigint, ARRAY[{{buckets}}])
FROM (SELECT *, width_bucket(ttft_ms - 1, ARRAY[{{bounds}}]) AS bucket FROM usage_records WHERE {_OF_MONTH}) r
GROUP BY 1, 2, 3, 4, 5 ORDER BY 2
""").format(
    no_id=sql.Literal(NO_ID),
    counts=sql.SQL(", ").join(
        sql.SQL("count(*) FILTER (WHERE bucket = {})").format(sql.Literal(index)) for index in range(BUCKETS)
    ),
    buckets=sql.Literal(BUCKETS),
    bounds=sql.SQL(", ").join(map(sql.Literal, TTFT_BOUNDS_MS)),
)
# Every amount is of whole nano-units, so the sums of amounts rounded one by one are those of the rollups.
TOTALS = sql.SQL("""
INSERT INTO usage_totals
SELECT tenant_id, level, subject_id, period, sum(requests), sum(uncached_tokens + cached_tokens + completion_tokens),
    sum(amount_pico) / 1000
FROM (
    SELECT tenant_id, adapter_id, api_key_id, date_trunc('day', hour, 'UTC') AS day, sum(requests) AS requests,
        sum(uncached_tokens) AS uncached_tokens, sum(cached_tokens) AS cached_tokens,
        sum(completion_tokens) AS completion_tokens, sum(amount_pico) AS amount_pico
    FROM usage_rollups GROUP BY 1, 2, 3, 4
) r CROSS JOIN LATERAL (
    VALUES ('tenant', tenant_id), ('key', api_key_id), ('adapter', adapter_id)
) s (level, subject_id) CROSS JOIN LATERAL (
    VALUES (to_char(day AT TIME ZONE 'UTC', '"d:"YYYY-MM-DD')), (to_char(day AT TIME ZONE 'UTC', '"m:"YYYY-MM'))
) p (period)
WHERE subject_id <> {no_id} GROUP BY 1, 2, 3, 4
""").format(no_id=sql.Literal(NO_ID))
# What PostgreSQL keeps up to date row by row, and makes at once in a fraction of the time.
CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = ANY(%s::regclass[]) AND contype IN ('p', 'f') ORDER BY contype DESC, conname
"""
INDEXES = """
SELECT indexrelid::regclass::text, replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON ') FROM pg_index
WHERE indrelid = ANY(%s::regclass[]) AND indexrelid NOT IN (SELECT conindid FROM pg_constraint) ORDER BY 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerShape:
    """Rows evenly over `months` months, the current one included, and over each tenant's keys and adapters. The first tenant
    has `LARGEST_PERCENT` of them.
    """

    rows: int = 5_000_000
    months: int = 6
    tenants: int = 20
    keys: int = 3
    adapters: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Month:
    """The rows of a month by their numbers, `end` included."""

    start: datetime
    begin: int
    end: int

    @property
    def name(self) -> str:
        return periods_of(self.start).month


def months_until(now: datetime, count: int) -> list[datetime]:
    """The first moments of `count` months, the oldest first; the last is that of `now`."""
    months = [period_start(periods_of(now).month)]
    while len(months) < count:
        months.insert(0, period_start(periods_of(months[0] - timedelta(days=1)).month))
    return months


def identity(kind: str, number: int) -> UUID:
    """The id of one of the things that a load makes."""
    return UUID(md5(f"{kind}{number}".encode(), usedforsecurity=False).hexdigest())


def price_version_ids() -> tuple[UUID, UUID]:
    """The versions in force in the first and in the second half of the months."""
    return identity("version", 0), identity("version", 1)


def tenant_ids(shape: LedgerShape) -> list[UUID]:
    """The tenants of a load, the largest first."""
    return [identity("tenant", number) for number in range(1, shape.tenants + 1)]


async def load_ledger(url: str, shape: LedgerShape, progress: Callable[[str], None]) -> list[UUID]:
    """Load an empty ledger, as the owner of its tables; return the tenants, the largest first. Every core makes months."""
    now = datetime.now(UTC)
    months = months_until(now, shape.months)
    async with await AsyncConnection.connect(url, autocommit=True) as owner:
        await owner.execute("SET maintenance_work_mem = '512MB'")
        await _make_room(owner, shape, months)
        async with _without_indexes(owner, TABLES):
            await _load_months(url, shape, months, now, progress)
            await owner.execute("SET ROLE app_writer")
            await owner.execute(TOTALS)
            await owner.execute("RESET ROLE")
            progress("indexes")
        for table in (*TABLES, "monthly_rollups"):
            await owner.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(table)))
    return tenant_ids(shape)


async def _make_room(owner: AsyncConnection, shape: LedgerShape, months: Sequence[datetime]) -> None:
    await owner.execute("SET ROLE app_operator")
    for month in months:
        await owner.execute("SELECT add_usage_partition('usage_records', %s)", (month,))
    await owner.execute(TENANTS, {"tenants": shape.tenants})
    prices = {"repriced": months[len(months) // 2], "versions": list(price_version_ids())}
    await owner.execute(PRICES, prices)
    await owner.execute("RESET ROLE")


@asynccontextmanager
async def _without_indexes(owner: AsyncConnection, tables: list[str]) -> AsyncIterator[None]:
    """Drop the indexes, primary and foreign keys of tables; make them again at the end."""
    constraints = await (await owner.execute(CONSTRAINTS, (tables,))).fetchall()
    indexes = await (await owner.execute(INDEXES, (tables,))).fetchall()
    for table, name, _ in reversed(constraints):
        await owner.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
    for name, _ in indexes:
        await owner.execute(f"DROP INDEX {name}")
    yield
    for table, name, definition in constraints:
        await owner.execute(f'ALTER TABLE {table} ADD CONSTRAINT "{name}" {definition}')
    for _, definition in indexes:
        await owner.execute(definition)


async def _load_months(
    url: str, shape: LedgerShape, months: Sequence[datetime], now: datetime, progress: Callable[[str], None]
) -> None:
    """Make each month's rows and rollups in a connection of its own, as many at once as there are cores."""
    slots = asyncio.Semaphore(available_cores())
    common = _parameters(shape, months[0], now)
    repriced = months[len(months) // 2]

    async def load(month: _Month) -> None:
        async with slots, await AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute("SET ROLE app_writer")
            await connection.execute("SET work_mem = '256MB'")
            own = {"begin": month.begin, "end": month.end, "month": month.name, "start": month.start}
            own["until"] = period_end(month.name)
            own["price_version_id"] = price_version_ids()[month.start >= repriced]
            for statement in (ROWS, ROLLUPS, REQUESTS):
                await connection.execute(statement, common | own)
            progress(f"{month.name[2:]}: {month.end - month.begin + 1:,} of {shape.rows:,} rows")

    async with asyncio.TaskGroup() as group:
        for month in _numbered(shape.rows, months, now):
            group.create_task(load(month))


def _numbered(rows: int, months: Sequence[datetime], now: datetime) -> list[_Month]:
    """The months with the numbers of their rows, which are spread evenly until `now`."""
    step = (now - months[0]) / rows
    begins = [max(1, -(-(month - months[0]) // step)) for month in months]
    ends = [*(begin - 1 for begin in begins[1:]), rows]
    return [
        _Month(start=month, begin=begin, end=end)
        for month, begin, end in zip(months, begins, ends, strict=True)
    ]


def _parameters(shape: LedgerShape, first: datetime, last: datetime) -> dict[str, Any]:
    tenants = tenant_ids(shape)
    return {
        "first": first,
        "last": last,
        "rows": shape.rows,
        "tenants": shape.tenants,
        "keys": shape.keys,
        "adapters": shape.adapters,
        "percent": max(LARGEST_PERCENT, 100 // shape.tenants),
        "tenant_ids": tenants,
        "key_ids": [identity(f"{each}key", number) for each in tenants for number in range(shape.keys)],
        "adapter_ids": [
            identity(f"{each}adapter", number) for each in tenants for number in range(shape.adapters)
        ],
    }
