"""Usage summed from the hourly rollups, by time and by any of tenant, adapter, key and token class.

Invariant: the rows of a report add up to its totals exactly. Only `requests` is the same in all token classes of a group, which
has a row also if its requests used nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ledger.failed_requests import REFUSED_PREFIX
from loraplex.tenants.models import NO_ID
from loraplex.tenants.models.usage import REST

Bucket: TypeAlias = Literal["1h", "1d", "1mo"]
Dimension: TypeAlias = Literal["tenant", "adapter", "key", "class"]
CLASSES: Final = ("uncached_prompt", "cached_prompt", "completion", "correction", "reasoning")
"""Token classes in the order of a report, by which cursors name them: a new one comes last. `correction` has no tokens: it is
the amount that tokens times prices do not explain, of corrections and of usage from before rate cards.
"""
NO_CLASS: Final = -1
# A day is a number of seconds: `date_trunc` with a zone takes most of the time of a month's report.
_STARTS: Final = {
    "1h": "u.hour",
    "1d": "date_bin('1 day', u.hour, TIMESTAMPTZ '1970-01-01Z')",
    "1mo": "date_trunc('month', u.hour, 'UTC')",
}
_COLUMNS: Final[dict[Dimension, str]] = {
    "tenant": "u.tenant_id",
    "adapter": "u.adapter_id",
    "key": "u.api_key_id",
}
_NO_ID: Final = f"'{NO_ID}'::uuid"
_NAMES: Final = "a.name, k.key_id, k.name, k.kind, t.name"
_NAMED: Final = """LEFT JOIN adapters a ON a.id = r.adapter_id LEFT JOIN api_keys k ON k.id = r.api_key_id
    LEFT JOIN tenants t ON t.id = r.tenant_id"""
_FILTERS: Final = {
    "currency": "u.currency = :currency",
    "adapter": "u.adapter_id IN (SELECT id FROM adapters WHERE tenant_id = :tenant_id AND name = :adapter)",
    "base_model": f"u.adapter_id = {_NO_ID}",
    "key_id": "u.api_key_id IN (SELECT id FROM api_keys WHERE tenant_id = :tenant_id AND key_id = :key_id)",
}
_IN_RANGE: Final = "u.hour >= :start AND u.hour < :end"
_OF_TENANT: Final = f"{{}} u WHERE u.tenant_id = :tenant_id AND {_IN_RANGE}"
# Operators read all tenants: each by the key of the table, which begins with the tenant.
_OF_ALL: Final = f"tenants t JOIN {{}} u ON u.tenant_id = t.id WHERE {_IN_RANGE}"
_GROUP: Final = "start, tenant_id, adapter_id, api_key_id, currency"
_WHOLE_GROUPS: Final = f"""
    SELECT {_GROUP}, {NO_CLASS} AS class, requests, uncached + cached AS prompt, cached, completion, reasoning, amount
    FROM summed"""
# Tokens are multiplied once per price, after they are added up.
_BY_CLASS: Final = f"""
    SELECT {_GROUP}, c.class, g.requests, c.prompt, c.cached, c.completion, c.reasoning, c.amount
    FROM (
        SELECT {_GROUP}, sum(s.requests) AS requests, sum(s.uncached) AS uncached, sum(s.cached) AS cached,
            sum(s.completion) AS completion, sum(s.reasoning) AS reasoning,
            coalesce(sum(s.uncached * p.prompt), 0) AS uncached_amount,
            coalesce(sum(s.cached * p.cached_prompt), 0) AS cached_amount,
            coalesce(sum((s.completion - s.reasoning) * p.completion), 0) AS completion_amount,
            coalesce(sum(s.reasoning * coalesce(p.reasoning, p.completion)), 0) AS reasoning_amount, sum(s.amount) AS amount
        FROM summed s LEFT JOIN price_versions p ON p.id = s.price_version_id
        GROUP BY {_GROUP}
    ) g CROSS JOIN LATERAL (VALUES
        (0, g.uncached, 0, 0, 0, g.uncached_amount), (1, g.cached, g.cached, 0, 0, g.cached_amount),
        (2, 0, 0, g.completion - g.reasoning, 0, g.completion_amount),
        (3, 0, 0, 0, 0, g.amount - g.uncached_amount - g.cached_amount - g.completion_amount - g.reasoning_amount),
        (4, 0, 0, g.reasoning, g.reasoning, g.reasoning_amount)
    ) c (class, prompt, cached, completion, reasoning, amount)
    WHERE c.prompt <> 0 OR c.completion <> 0 OR c.amount <> 0
        OR c.class = 0 AND g.uncached = 0 AND g.cached = 0 AND g.completion = 0 AND g.reasoning = 0
        AND g.amount = 0"""
_ORDER: Final = "start, tenant_id, adapter_id, api_key_id, currency, class"
_FOLLOWING: Final = """
    WHERE (start, tenant_id, adapter_id, api_key_id, currency, class)
        > (:after_start, :after_tenant, :after_adapter, :after_key, CAST(:after_currency AS char(3)), :after_class)"""
DAY: Final = timedelta(days=1)
WHOLE_ROWS: Final = 500
"""So many rows are read for a first page: a report that has fewer needs no second query for its totals."""
WIDENED: Final = 4
"""A page that one stretch of time does not fill is continued with one so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """`start` and `end`, exclusive, are whole hours; a first or last bucket is cut to them. `tenant_id` None: all tenants.

    `currency` None: all, in rows of their own. `adapter`, a name, and `key_id`, a public id, None: all; both only with a
    tenant. `base_model` selects what no adapter used.
    """

    tenant_id: UUID | None
    currency: str | None = None
    adapter: str | None = None
    base_model: bool = False
    key_id: str | None = None
    start: datetime
    end: datetime
    bucket: Bucket
    group_by: frozenset[Dimension]


class UsageKey(NamedTuple):
    """The group of a row: the begin of its bucket, then ids, `NO_ID` where the report is not grouped by them, its currency,
    and the index of its token class, `NO_CLASS` if it is not grouped by class. Rows are sorted by it.
    """

    start: datetime
    tenant_id: UUID
    adapter_id: UUID
    api_key_id: UUID
    currency: str
    token_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSums:
    """`prompt_tokens` includes `cached_tokens`, and `completion_tokens` includes `reasoning_tokens`. `amount_pico` is exact."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    amount_pico: int = 0

    def __add__(self, other: "UsageSums") -> "UsageSums":
        return UsageSums(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            amount_pico=self.amount_pico + other.amount_pico,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The sums of one group. `adapter`: its name, None for the base model. `key_id`: the public id of the key. `tenant`: its name.

    A tenant, an adapter or a key whose row was erased is named by its UUID. Each is None where the report is not grouped by it.
    `console_key`: the name of a key that the console made for its own pages, such as `playground`; None for other keys.
    """

    key: UsageKey
    tenant: str | None
    adapter: str | None
    key_id: str | None
    key_name: str | None
    console_key: str | None
    sums: UsageSums

    @property
    def currency(self) -> str:
        return self.key.currency

    @property
    def token_class(self) -> str | None:
        """The name of the row's class; None if the report is not grouped by class."""
        return None if self.key.token_class == NO_CLASS else CLASSES[self.key.token_class]


async def usage_totals(session: AsyncSession, query: UsageQuery) -> dict[str, UsageSums]:
    """The sums over the whole range by currency, which holds only currencies with usage."""
    statement = text(f"""
        SELECT u.currency, sum(u.requests), sum(u.uncached_tokens) + sum(u.cached_tokens), sum(u.cached_tokens),
            sum(u.completion_tokens), sum(u.reasoning_tokens), sum(u.amount_pico)
        FROM {_source(query)} GROUP BY u.currency ORDER BY u.currency""")
    found = await session.execute(statement, _parameters(query))
    return {row[0]: _sums(row[1:]) for row in found}


async def refused_requests(session: AsyncSession, query: UsageQuery) -> int:
    """How many requests of the range were refused before an engine worked on them: by a limit, a full server, or a wrong value.

    They have no usage, no record in the ledger and so no currency.
    """
    source = _source(replace(query, currency=None), "request_rollups")
    statement = text(f"SELECT sum(u.requests) FROM {source} AND u.status LIKE '{REFUSED_PREFIX}%'")
    return int(await session.scalar(statement, _parameters(query)) or 0)


async def usage_rows(
    session: AsyncSession, query: UsageQuery, after: UsageKey | None, limit: int
) -> list[UsageRow]:
    """At most `limit` rows that follow the row `after`, sorted by their keys.

    The range is read stretch by stretch until the rows suffice: a page of a fine report reads little of a long range.
    """
    rows: list[UsageRow] = []
    start = query.start if after is None else max(query.start, after.start)
    # Without ids a bucket has at most one row of a currency and class, so that `limit` rows need as many buckets anyway.
    rows_of_day = (24 if query.bucket == "1h" else 1) * (len(CLASSES) if "class" in query.group_by else 1)
    buckets = 1 if query.group_by - {"class"} else limit // rows_of_day + 1
    while start < query.end and len(rows) < limit:
        end = min(_later(start, query.bucket, buckets), query.end)
        rows += await _rows_within(session, replace(query, start=start, end=end), after, limit - len(rows))
        start, buckets = end, WIDENED * buckets
    return rows


async def first_rows(
    session: AsyncSession, query: UsageQuery, limit: int
) -> tuple[list[UsageRow], dict[str, UsageSums]]:
    """The first `limit` rows, and the totals of the whole range as `usage_totals` returns them."""
    rows = await usage_rows(session, query, None, max(limit, WHOLE_ROWS))
    whole = len(rows) < max(limit, WHOLE_ROWS)
    return rows[:limit], totals_of(rows) if whole else await usage_totals(session, query)


async def daily_sums(
    session: AsyncSession, tenant_id: UUID, currency: str, first: date, last: date, key_id: str | None = None
) -> dict[datetime, UsageSums]:
    """The sums of each day (UTC) from the first to the last, of days without usage too, by their begin."""
    start, days = datetime.combine(first, time(), UTC), (last - first).days + 1
    query = UsageQuery(
        tenant_id=tenant_id,
        currency=currency,
        key_id=key_id,
        start=start,
        end=start + timedelta(days=days),
        bucket="1d",
        group_by=frozenset(),
    )
    found = {row.key.start: row.sums for row in await usage_rows(session, query, None, days)}
    starts = (start + timedelta(days=number) for number in range(days))
    return {each: found.get(each, UsageSums()) for each in starts}


async def ranked_rows(
    session: AsyncSession, query: UsageQuery, ranked: Literal["tenant", "adapter", "key"], named: int
) -> list[UsageRow]:
    """All rows of a report by tenant, adapter or key, with rows of their own for the `named` groups of the largest amount in each
    currency.

    The other groups are one, whose id is `REST`. The query's `group_by` is not read.
    """
    statement = _ranked(query, ranked)
    found = await session.execute(statement, {**_parameters(query), "named": named})
    return [_row(values) for values in found]


def totals_of(rows: Iterable[UsageRow]) -> dict[str, UsageSums]:
    """The sums of all rows of a report by currency. The token classes of a group share its requests."""
    totals: dict[str, UsageSums] = {}
    group = None
    for row in rows:
        sums = row.sums if row.key[:5] != group else replace(row.sums, requests=0)
        group = row.key[:5]
        totals[row.currency] = totals.get(row.currency, UsageSums()) + sums
    return dict(sorted(totals.items()))


async def _rows_within(
    session: AsyncSession, query: UsageQuery, after: UsageKey | None, limit: int
) -> list[UsageRow]:
    parameters = {**_parameters(query), "limit": limit}
    if after is not None:
        names = ("after_start", "after_tenant", "after_adapter", "after_key", "after_currency", "after_class")
        parameters |= dict(zip(names, after, strict=True))
    found = await session.execute(_statement(query, following=after is not None), parameters)
    return [_row(values) for values in found]


def _later(time: datetime, bucket: Bucket, number: int) -> datetime:
    """The begin of the day, or of the month for monthly buckets, that follows `time` by so many."""
    day = time.replace(hour=0)
    if bucket != "1mo":
        return day + number * DAY
    months = day.year * 12 + day.month - 1 + number
    return day.replace(year=months // 12, month=months % 12 + 1, day=1)


def _statement(query: UsageQuery, *, following: bool) -> TextClause:
    by_class = "class" in query.group_by
    columns = {name: column if name in query.group_by else _NO_ID for name, column in _COLUMNS.items()}
    price = ", u.price_version_id" if by_class else ""
    groups = [_STARTS[query.bucket], *(columns[name] for name in _COLUMNS if name in query.group_by)]
    return text(f"""
WITH summed AS (
    SELECT {_STARTS[query.bucket]} AS start, {columns["tenant"]} AS tenant_id, {columns["adapter"]} AS adapter_id,
        {columns["key"]} AS api_key_id, u.currency{price}, sum(u.requests) AS requests,
        sum(u.uncached_tokens) AS uncached, sum(u.cached_tokens) AS cached, sum(u.completion_tokens) AS completion,
        sum(u.reasoning_tokens) AS reasoning, sum(u.amount_pico) AS amount
    FROM {_source(query)} GROUP BY {", ".join(groups)}, u.currency{price}
), rows AS ({_BY_CLASS if by_class else _WHOLE_GROUPS}), page AS (
    SELECT * FROM rows{_FOLLOWING if following else ""} ORDER BY {_ORDER} LIMIT :limit
)
SELECT r.start, r.tenant_id, r.adapter_id, r.api_key_id, r.currency, r.class, r.requests, r.prompt, r.cached, r.completion,
    r.reasoning, r.amount, {_NAMES}
FROM page r {_NAMED}
ORDER BY {", ".join(f"r.{name}" for name in _ORDER.split(", "))}
""")


def _ranked(query: UsageQuery, ranked: Dimension) -> TextClause:
    """One scan of the range, in the columns of `_statement`. Amounts of different currencies are not compared."""
    shown = f"coalesce(n.ranked_id, '{REST}'::uuid)"
    tenant, adapter, key = (shown if name == ranked else _NO_ID for name in _COLUMNS)
    return text(f"""
WITH summed AS MATERIALIZED (
    SELECT {_STARTS[query.bucket]} AS start, {_COLUMNS[ranked]} AS id, u.currency, sum(u.requests) AS requests,
        sum(u.uncached_tokens) AS uncached, sum(u.cached_tokens) AS cached, sum(u.completion_tokens) AS completion,
        sum(u.reasoning_tokens) AS reasoning, sum(u.amount_pico) AS amount
    FROM {_source(query)} GROUP BY 1, 2, 3
), ranked AS (
    SELECT id AS ranked_id, currency AS of_currency,
        row_number() OVER (PARTITION BY currency ORDER BY sum(amount) DESC, sum(requests) DESC, id) AS place
    FROM summed GROUP BY id, currency
), rows AS (
    SELECT s.start, {tenant} AS tenant_id, {adapter} AS adapter_id, {key} AS api_key_id, s.currency, {NO_CLASS} AS class,
        sum(s.requests), sum(s.uncached) + sum(s.cached), sum(s.cached), sum(s.completion), sum(s.reasoning), sum(s.amount)
    FROM summed s LEFT JOIN ranked n ON n.ranked_id = s.id AND n.of_currency = s.currency AND n.place <= :named
    GROUP BY {_GROUP}
)
SELECT r.*, {_NAMES}
FROM rows r {_NAMED}
ORDER BY {", ".join(f"r.{name}" for name in _GROUP.split(", "))}
""")


def _source(query: UsageQuery, table: str = "usage_rollups") -> str:
    """The rollups of a query, with its conditions."""
    source = (_OF_ALL if query.tenant_id is None else _OF_TENANT).format(table)
    return " AND ".join(
        [source, *(condition for name, condition in _FILTERS.items() if getattr(query, name))]
    )


def _parameters(query: UsageQuery) -> dict[str, Any]:
    given = {name: getattr(query, name) for name in ("tenant_id", "currency", "adapter", "key_id")}
    times = {"start": query.start, "end": query.end}
    return {**times, **{name: value for name, value in given.items() if value is not None}}


def _row(values: Any) -> UsageRow:
    *sums, adapter, key_id, key_name, key_kind, tenant = values[6:]
    key = UsageKey(*values[:6])
    return UsageRow(
        key=key,
        tenant=_name(tenant, key.tenant_id),
        adapter=_name(adapter, key.adapter_id),
        key_id=_name(key_id, key.api_key_id),
        key_name=key_name,
        console_key=key_name if key_kind == "console" else None,
        sums=_sums(sums),
    )


def _name(name: str | None, identity: UUID) -> str | None:
    return name if name is not None or identity == NO_ID else str(identity)


def _sums(values: Any) -> UsageSums:
    """PostgreSQL's sums of 64 bits are `numeric`, which are whole numbers here."""
    requests, prompt, cached, completion, reasoning, amount = map(int, values)
    return UsageSums(
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        amount_pico=amount,
    )
