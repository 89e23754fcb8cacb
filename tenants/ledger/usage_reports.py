"""Usage summed from the hourly rollups, by time and by any of tenant, adapter, key and token class.

Invariant: the rows of a report add up to its totals exactly. Only `requests` is the same in all token classes of a group.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import NO_ID

Bucket: TypeAlias = Literal["1h", "1d", "1mo"]
Dimension: TypeAlias = Literal["tenant", "adapter", "key", "class"]
CLASSES: Final = ("uncached_prompt", "cached_prompt", "completion", "correction")
"""Token classes in the order of a report. `correction` has no tokens: it is the amount that tokens times prices do not explain,
of corrections and of usage from before rate cards.
"""
NO_CLASS: Final = -1
_STARTS: Final = {
    "1h": "u.hour",
    "1d": "date_trunc('day', u.hour, 'UTC')",
    "1mo": "date_trunc('month', u.hour, 'UTC')",
}
_COLUMNS: Final[dict[Dimension, str]] = {
    "tenant": "u.tenant_id",
    "adapter": "u.adapter_id",
    "key": "u.api_key_id",
}
_NO_ID: Final = f"'{NO_ID}'::uuid"
_IN_RANGE: Final = "u.hour >= :start AND u.hour < :end"
# Operators read all tenants: each by the key of the table, which begins with the tenant.
_OF_TENANT: Final = "usage_rollups u"
_OF_ALL: Final = "tenants t JOIN usage_rollups u ON u.tenant_id = t.id"
_PRICES: Final = " LEFT JOIN price_versions p ON p.id = u.price_version_id"
_CLASS_AMOUNTS: Final = """,
        coalesce(sum(u.uncached_tokens::numeric * p.prompt), 0) AS uncached_amount,
        coalesce(sum(u.cached_tokens::numeric * p.cached_prompt), 0) AS cached_amount,
        coalesce(sum(u.completion_tokens::numeric * p.completion), 0) AS completion_amount,
        sum(u.amount_pico - coalesce(u.uncached_tokens::numeric * p.prompt + u.cached_tokens::numeric * p.cached_prompt
            + u.completion_tokens::numeric * p.completion, 0)) AS unexplained_amount"""
_WHOLE_GROUPS: Final = f"""
    SELECT start, tenant_id, adapter_id, api_key_id, {NO_CLASS} AS class, requests, uncached + cached AS prompt, cached,
        completion, amount
    FROM grouped"""
_BY_CLASS: Final = """
    SELECT g.start, g.tenant_id, g.adapter_id, g.api_key_id, c.class, g.requests, c.prompt, c.cached, c.completion, c.amount
    FROM grouped g CROSS JOIN LATERAL (VALUES
        (0, g.uncached, 0, 0, g.uncached_amount), (1, g.cached, g.cached, 0, g.cached_amount),
        (2, 0, 0, g.completion, g.completion_amount), (3, 0, 0, 0, g.unexplained_amount)
    ) c (class, prompt, cached, completion, amount)
    WHERE c.prompt <> 0 OR c.completion <> 0 OR c.amount <> 0"""
_FOLLOWING: Final = """
    WHERE (start, tenant_id, adapter_id, api_key_id, class)
        > (:after_start, :after_tenant, :after_adapter, :after_key, :after_class)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """`start` and `end`, exclusive, are whole hours; a first or last bucket is cut to them. `tenant_id` None: all tenants."""

    tenant_id: UUID | None
    start: datetime
    end: datetime
    bucket: Bucket
    group_by: frozenset[Dimension]


class UsageKey(NamedTuple):
    """The group of a row: the begin of its bucket, then ids, `NO_ID` where the report is not grouped by them, and the index
    of its token class, `NO_CLASS` if it is not grouped by class. Rows are sorted by it.
    """

    start: datetime
    tenant_id: UUID
    adapter_id: UUID
    api_key_id: UUID
    token_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSums:
    """`prompt_tokens` includes `cached_tokens`. `amount_pico` is exact."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    amount_pico: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The sums of one group. `adapter`: its name, None for the base model. `key_id`: the public id of the key.

    An adapter or a key whose row was erased is named by its UUID. Both are None where the report is not grouped by them.
    """

    key: UsageKey
    adapter: str | None
    key_id: str | None
    sums: UsageSums

    @property
    def token_class(self) -> str | None:
        """The name of the row's class; None if the report is not grouped by class."""
        return None if self.key.token_class == NO_CLASS else CLASSES[self.key.token_class]


async def usage_totals(session: AsyncSession, query: UsageQuery) -> dict[str, UsageSums]:
    """The sums over the whole range by currency, which holds only currencies with usage."""
    statement = text(f"""
        SELECT u.currency, sum(u.requests), sum(u.uncached_tokens) + sum(u.cached_tokens), sum(u.cached_tokens),
            sum(u.completion_tokens), sum(u.amount_pico)
        FROM {_source(query)} WHERE {_IN_RANGE} GROUP BY u.currency ORDER BY u.currency""")
    found = await session.execute(statement, _parameters(query))
    return {row[0]: _sums(row[1:]) for row in found}


async def usage_rows(
    session: AsyncSession, query: UsageQuery, currency: str, after: UsageKey | None, limit: int
) -> list[UsageRow]:
    """At most `limit` rows of one currency that follow the row `after`, sorted by their keys."""
    parameters = {**_parameters(query), "currency": currency, "limit": limit}
    if after is not None:
        parameters |= {
            "start": max(query.start, after.start),
            "after_start": after.start,
            "after_tenant": after.tenant_id,
            "after_adapter": after.adapter_id,
            "after_key": after.api_key_id,
            "after_class": after.token_class,
        }
    found = await session.execute(_statement(query, following=after is not None), parameters)
    return [_row(values) for values in found]


def _statement(query: UsageQuery, *, following: bool) -> TextClause:
    by_class = "class" in query.group_by
    columns = {name: column if name in query.group_by else _NO_ID for name, column in _COLUMNS.items()}
    groups = [_STARTS[query.bucket], *(columns[name] for name in _COLUMNS if name in query.group_by)]
    return text(f"""
WITH grouped AS (
    SELECT {_STARTS[query.bucket]} AS start, {columns["tenant"]} AS tenant_id, {columns["adapter"]} AS adapter_id,
        {columns["key"]} AS api_key_id, sum(u.requests) AS requests, sum(u.uncached_tokens) AS uncached,
        sum(u.cached_tokens) AS cached, sum(u.completion_tokens) AS completion,
        sum(u.amount_pico) AS amount{_CLASS_AMOUNTS if by_class else ""}
    FROM {_source(query, _PRICES if by_class else "")}
    WHERE {_IN_RANGE} AND u.currency = :currency GROUP BY {", ".join(groups)}
), ungrouped AS ({_BY_CLASS if by_class else _WHOLE_GROUPS}), page AS (
    SELECT * FROM ungrouped{_FOLLOWING if following else ""}
    ORDER BY start, tenant_id, adapter_id, api_key_id, class LIMIT :limit
)
SELECT r.*, a.name, k.key_id
FROM page r LEFT JOIN adapters a ON a.id = r.adapter_id LEFT JOIN api_keys k ON k.id = r.api_key_id
ORDER BY r.start, r.tenant_id, r.adapter_id, r.api_key_id, r.class
""")


def _source(query: UsageQuery, joined: str = "") -> str:
    """The rollups that a query reads, up to its `WHERE`, whose first condition is the tenant."""
    if query.tenant_id is None:
        return f"{_OF_ALL}{joined}"
    return f"(SELECT * FROM {_OF_TENANT} WHERE u.tenant_id = :tenant_id) u{joined}"


def _parameters(query: UsageQuery) -> dict[str, Any]:
    times = {"start": query.start, "end": query.end}
    return times if query.tenant_id is None else {**times, "tenant_id": query.tenant_id}


def _row(values: Any) -> UsageRow:
    *key, requests, prompt, cached, completion, amount, adapter, key_id = values
    group = UsageKey(*key)
    return UsageRow(
        key=group,
        adapter=_name(adapter, group.adapter_id),
        key_id=_name(key_id, group.api_key_id),
        sums=_sums((requests, prompt, cached, completion, amount)),
    )


def _name(name: str | None, identity: UUID) -> str | None:
    return name if name is not None or identity == NO_ID else str(identity)


def _sums(values: Any) -> UsageSums:
    """PostgreSQL's sums of 64 bits are `numeric`, which are whole numbers here."""
    requests, prompt, cached, completion, amount = map(int, values)
    return UsageSums(
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        amount_pico=amount,
    )
