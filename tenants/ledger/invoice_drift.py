"""SQL that compares what final invoices billed of one month with its rollups, per tenant, currency, adapter and price version.

Invariant: usage that was settled after the last invoice that could bill it is no difference. Neither is a month whose invoice was
voided and not made again.
"""

from typing import Final

from loraplex.tenants.models import NO_ID

# An invoice is dated by the begin of its transaction, as rows are: of those settled around it, some are billed.
AROUND: Final = "interval '2 minutes'"
_BILLED: Final = "state IN ('final', 'paid')"
_GROUP: Final = "tenant_id, currency, adapter_id, price_version_id"
_TOKENS: Final = "r.uncached_tokens + r.cached_tokens + r.completion_tokens"


def _exceeds(name: str) -> str:
    """By how much an invoice exceeds what it had to bill: the distance to what rows around it allow."""
    missing = f"(d.{name} - coalesce(l.{name}, 0))"
    least, most = f"coalesce(l.least_{name}, 0)", f"coalesce(l.most_{name}, 0)"
    return f"least(greatest({missing}, {least}), {most}) - {missing}"


def _late(name: str, value: str) -> str:
    around = f"FILTER (WHERE r.settled_at <= c.finalized_at + {AROUND})"
    return f"""sum({value}) FILTER (WHERE r.settled_at > c.finalized_at + {AROUND}) AS {name},
            sum(least({value}, 0)) {around} AS least_{name}, sum(greatest({value}, 0)) {around} AS most_{name}"""


def invoices_compared(records: str) -> str:
    """Build the comparison. `records`: the ledger's rows `r` of the month, up to their conditions."""
    return f"""
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
        SELECT {", ".join(f"u.{name}" for name in _GROUP.split(", "))},
            u.uncached_tokens + u.cached_tokens + u.completion_tokens AS tokens, u.amount_pico
        FROM covered c JOIN monthly_rollups u ON u.tenant_id = c.tenant_id AND u.currency = c.currency
        WHERE u.month = :start AND (
            u.price_version_id <> '{NO_ID}'
            OR (SELECT min(f.month) FROM invoices f WHERE f.tenant_id = u.tenant_id) <= :invoiced
        )
    ), due AS MATERIALIZED (
        SELECT {_GROUP}, coalesce(u.tokens, 0) - coalesce(b.tokens, 0) AS tokens,
            coalesce(u.amount_pico, 0) - coalesce(b.amount_pico, 0) AS amount_pico
        FROM used u FULL JOIN billed b USING ({_GROUP})
    ), late AS (
        SELECT r.tenant_id, r.currency, coalesce(r.adapter_id, '{NO_ID}') AS adapter_id,
            coalesce(r.price_version_id, '{NO_ID}') AS price_version_id,
            {_late("tokens", _TOKENS)}, {_late("amount_pico", "r.amount_pico")}
        FROM covered c, {records} AND r.tenant_id = c.tenant_id AND r.currency = c.currency
            AND r.settled_at > c.finalized_at - {AROUND}
            AND (c.tenant_id, c.currency) IN (SELECT tenant_id, currency FROM due WHERE tokens <> 0 OR amount_pico <> 0)
        GROUP BY 1, 2, 3, 4
    )
    SELECT d.tenant_id, concat_ws(' ', :invoiced, 'adapter', d.adapter_id, 'price', d.price_version_id, d.currency) AS place,
        jsonb_strip_nulls(jsonb_build_object(
            'tokens', nullif({_exceeds("tokens")}, 0), 'amount_pico', nullif({_exceeds("amount_pico")}, 0)
        )) AS differs, {_exceeds("amount_pico")} AS drift_pico
    FROM due d LEFT JOIN late l USING ({_GROUP})"""
