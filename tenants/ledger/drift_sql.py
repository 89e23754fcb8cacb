"""SQL of the comparisons: rows of the ledger with rollups and totals, hours with months, days with months, months with invoices.

Invariant: a statement has one row for each sum: its tenant, its `place`, by how much each of its columns is too large (`differs`,
JSON without what is equal), and `drift_pico`. Usage that was settled after the last invoice that could bill it is no difference.
Neither is a month whose invoice was voided and not made again.
"""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import TextClause, text

from loraplex.tenants.ids import FIRST_TIME, LAST_TIME, uuid7_from
from loraplex.tenants.ledger.statements import AMOUNT_NANO
from loraplex.tenants.models import NO_ID

MAX_NAMED: Final = 20
"""Differences that a comparison names; it counts and adds up all of them."""
# An invoice is dated by the begin of its transaction, as rows are: of those settled around it, some are billed.
AROUND: Final = "interval '2 minutes'"
IN_TIME: Final = f"""(r.id >= :first_id AND r.id < :last_id
                OR r.id < '{uuid7_from(FIRST_TIME)}' OR r.id >= '{uuid7_from(LAST_TIME)}')"""
"""The rows `r` whose ids are of a range of times, or of none. Partitions of other months are not read."""
_OF_TENANTS: Final = "CAST(:tenants AS uuid[]) IS NULL OR {} = ANY(CAST(:tenants AS uuid[]))"
_RECORDS: Final = f"""usage_records r WHERE admitted_at >= :start AND admitted_at < :end
            AND {IN_TIME}
            AND ({_OF_TENANTS.format("r.tenant_id")})"""
_HOURS: Final = (
    "tenants t JOIN usage_rollups u ON u.tenant_id = t.id WHERE u.hour >= :start AND u.hour < :end"
)
_SUMMED: Final = ("uncached_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
_TOKENS: Final = "uncached_tokens + cached_tokens + completion_tokens"
_BILLED: Final = "state IN ('final', 'paid')"
_LINE: Final = "tenant_id, currency, adapter_id, price_version_id"


def _place(*parts: str) -> str:
    return f"concat_ws(' ', {', '.join(parts)})"


def _differs(exceeds: Mapping[str, str]) -> str:
    pairs = (f"'{name}', nullif({by}, 0)" for name, by in exceeds.items())
    return f"jsonb_strip_nulls(jsonb_build_object({', '.join(pairs)}))"


def _sums(expected: str, stored: str, key: str, place: str, columns: tuple[str, ...], drift_pico: str) -> str:
    """Each sum that is `expected` or `stored`. `drift_pico` contains {} for the difference of the last column, the amount."""
    exceeds = {name: f"coalesce(s.{name}, 0) - coalesce(e.{name}, 0)" for name in columns}
    return f"""
    SELECT tenant_id, {_differs(exceeds)} AS differs, {place} AS place, {drift_pico.format(exceeds[columns[-1]])} AS drift_pico
    FROM ({expected}) e FULL JOIN ({stored}) s USING ({key})"""


def _rollups(expected: str, stored: str, key: str, place: str) -> str:
    columns = ("requests", *_SUMMED, "amount_pico")
    return _sums(expected, stored, f"tenant_id, {key}, price_version_id, currency", place, columns, "{}")


def _totals(expected: str) -> str:
    stored, key = "SELECT * FROM usage_totals WHERE period = :period", "tenant_id, level, subject_id, period"
    columns, place = ("requests", "tokens", "amount_nano"), _place("period", "level", "subject_id")
    return _sums(expected, stored, key, place, columns, "({}) * 1000::numeric")


_ROLLUPS: Final = _rollups(
    f"""
        SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC') AS hour, coalesce(adapter_id, '{NO_ID}') AS adapter_id,
            api_key_id, coalesce(price_version_id, '{NO_ID}') AS price_version_id, currency,
            count(*) FILTER (WHERE kind = 'usage') AS requests, {", ".join(f"sum({name}) AS {name}" for name in _SUMMED)},
            sum(amount_pico) AS amount_pico
        FROM {_RECORDS} GROUP BY 1, 2, 3, 4, 5, 6""",
    f"SELECT u.* FROM {_HOURS}",
    "hour, adapter_id, api_key_id",
    _place(
        *("to_char(hour AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')", "'adapter'", "adapter_id"),
        *("'key'", "api_key_id", "'price'", "price_version_id", "currency"),
    ),
)
_MONTHLY: Final = _rollups(
    f"""
        SELECT u.tenant_id, CAST(:start AS timestamptz) AS month, u.adapter_id, u.price_version_id, u.currency,
            sum(u.requests) AS requests, {", ".join(f"sum(u.{name}) AS {name}" for name in _SUMMED)},
            sum(u.amount_pico) AS amount_pico
        FROM {_HOURS} GROUP BY 1, 3, 4, 5""",
    "SELECT * FROM monthly_rollups WHERE month >= :start AND month < :end",
    "month, adapter_id",
    _place(
        *("to_char(month AT TIME ZONE 'UTC', 'YYYY-MM')", "'adapter'", "adapter_id"),
        *("'price'", "price_version_id", "currency"),
    ),
)
_DAYS: Final = _totals(f"""
        SELECT r.tenant_id, l.level, l.subject_id, r.day AS period, sum(r.requests) AS requests, sum(r.tokens) AS tokens,
            sum(r.amount_nano) AS amount_nano
        FROM (
            SELECT tenant_id, api_key_id, adapter_id, day, count(*) FILTER (WHERE kind = 'usage') AS requests,
                sum({_TOKENS}) AS tokens, sum({AMOUNT_NANO}) AS amount_nano
            FROM {_RECORDS} GROUP BY 1, 2, 3, 4
        ) r CROSS JOIN LATERAL (
            VALUES ('tenant', r.tenant_id), ('key', r.api_key_id), ('adapter', r.adapter_id)
        ) l (level, subject_id)
        WHERE l.subject_id IS NOT NULL GROUP BY 1, 2, 3, 4""")
_MONTHS: Final = _totals("""
        SELECT tenant_id, level, subject_id, :period AS period, sum(requests) AS requests, sum(tokens) AS tokens,
            sum(amount_nano) AS amount_nano
        FROM usage_totals WHERE period LIKE :days GROUP BY 1, 2, 3""")


def _too_much(name: str) -> str:
    """By how much an invoice exceeds what it had to bill: the distance to what rows around it allow."""
    missing = f"(d.{name} - coalesce(l.{name}, 0))"
    least, most = f"coalesce(l.least_{name}, 0)", f"coalesce(l.most_{name}, 0)"
    return f"least(greatest({missing}, {least}), {most}) - {missing}"


def _late(name: str, value: str) -> str:
    around = f"FILTER (WHERE r.settled_at <= c.finalized_at + {AROUND})"
    return f"""sum({value}) FILTER (WHERE r.settled_at > c.finalized_at + {AROUND}) AS {name},
            sum(least({value}, 0)) {around} AS least_{name}, sum(greatest({value}, 0)) {around} AS most_{name}"""


_INVOICES: Final = f"""
    WITH covered AS (
        SELECT tenant_id, currency, max(finalized_at) FILTER (WHERE {_BILLED}) AS finalized_at
        FROM invoices WHERE month >= :invoiced GROUP BY 1, 2
        HAVING max(finalized_at) FILTER (WHERE {_BILLED}) > coalesce(max(voided_at), '-infinity')
    ), billed AS (
        SELECT i.tenant_id, i.currency, coalesce(n.adapter_id, '{NO_ID}') AS adapter_id,
            coalesce(n.price_version_id, '{NO_ID}') AS price_version_id, sum(n.tokens) AS tokens,
            sum(n.amount_pico) AS amount_pico
        FROM covered c JOIN invoices i ON i.tenant_id = c.tenant_id AND i.currency = c.currency AND i.{_BILLED}
        JOIN invoice_lines n ON n.invoice_id = i.id AND n.month = :invoiced AND n.token_class IS NOT NULL
        GROUP BY 1, 2, 3, 4
    ), used AS (
        SELECT {", ".join(f"u.{name}" for name in _LINE.split(", "))}, {_TOKENS} AS tokens, u.amount_pico
        FROM covered c JOIN monthly_rollups u ON u.tenant_id = c.tenant_id AND u.currency = c.currency
        WHERE u.month = :start AND (
            u.price_version_id <> '{NO_ID}'
            OR (SELECT min(f.month) FROM invoices f WHERE f.tenant_id = u.tenant_id) <= :invoiced
        )
    ), due AS MATERIALIZED (
        SELECT {_LINE}, coalesce(u.tokens, 0) - coalesce(b.tokens, 0) AS tokens,
            coalesce(u.amount_pico, 0) - coalesce(b.amount_pico, 0) AS amount_pico
        FROM used u FULL JOIN billed b USING ({_LINE})
    ), late AS (
        SELECT r.tenant_id, r.currency, coalesce(r.adapter_id, '{NO_ID}') AS adapter_id,
            coalesce(r.price_version_id, '{NO_ID}') AS price_version_id,
            {_late("tokens", _TOKENS)}, {_late("amount_pico", "r.amount_pico")}
        FROM covered c, {_RECORDS} AND r.tenant_id = c.tenant_id AND r.currency = c.currency
            AND r.settled_at > c.finalized_at - {AROUND}
            AND (c.tenant_id, c.currency) IN (SELECT tenant_id, currency FROM due WHERE tokens <> 0 OR amount_pico <> 0)
        GROUP BY 1, 2, 3, 4
    )
    SELECT d.tenant_id, {_differs({name: _too_much(name) for name in ("tokens", "amount_pico")})} AS differs,
        {_place(":invoiced", "'adapter'", "d.adapter_id", "'price'", "d.price_version_id", "d.currency")} AS place,
        {_too_much("amount_pico")} AS drift_pico
    FROM due d LEFT JOIN late l USING ({_LINE})"""
_COMPARED: Final = {
    "rollups": _ROLLUPS,
    "monthly_rollups": _MONTHLY,
    "days": _DAYS,
    "months": _MONTHS,
    "invoices": _INVOICES,
}


def comparison_of(compared: str) -> TextClause:
    """The statement of the comparison of that name: the number of sums, of those that differ, the sizes of all differences, the
    first differences as arrays of tenant, place and `differs`, and the tenants that have any.
    """
    return text(f"""
WITH compared AS MATERIALIZED ({_COMPARED[compared]})
SELECT count(*), count(*) FILTER (WHERE differs <> '{{}}'), coalesce(sum(abs(drift_pico)), 0),
    (array_agg(jsonb_build_array(tenant_id, place, differs)) FILTER (WHERE differs <> '{{}}'))[1:{MAX_NAMED}],
    array_agg(DISTINCT tenant_id) FILTER (WHERE differs <> '{{}}')
FROM compared WHERE {_OF_TENANTS.format("tenant_id")}""")
