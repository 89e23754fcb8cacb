"""The rows of the ledger for one tenant and month, with the prices of each, so that anyone can recompute its amount.

Invariant: every row of the month is there once, in the order of ids. Nothing is rounded or left out.
"""

from collections.abc import AsyncIterator
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ids import WRONG_CLOCK, uuid7_from
from loraplex.tenants.ledger.drift_sql import IN_TIME
from loraplex.tenants.periods import period_end, period_start

ROWS_AT_ONCE: Final = 1000
COLUMNS: Final = (
    *("id", "tenant_id", "kind", "reverses_id", "reason", "client_request_id", "api_key_id", "adapter_id"),
    *("adapter_version", "digest", "outcome", "uncached_tokens", "cached_tokens", "completion_tokens"),
    *("price_version_id", "currency", "price_uncached", "price_cached", "price_completion", "amount_pico"),
    *("day", "month", "admitted_at", "settled_at", "ttft_ms", "duration_ms", "system_fingerprint"),
    *("reasoning_tokens", "price_reasoning", "session"),
)
"""Prices are micro-units per million tokens, so tokens times price are pico-units; null for rows from before rate cards.
`completion_tokens` includes `reasoning_tokens`, which cost `price_reasoning` each.
"""
TEXTS: Final = ("client_request_id", "reason")
"""The columns whose text a client or an operator chose."""
_PRICES: Final = {
    "price_uncached": "p.prompt",
    "price_cached": "p.cached_prompt",
    "price_completion": "p.completion",
    "price_reasoning": "coalesce(p.reasoning, p.completion)",
}
_SELECTED: Final = ", ".join(
    f"{_PRICES[name]} AS {name}" if name in _PRICES else f"r.{name}" for name in COLUMNS
)
_ROWS: Final = text(f"""
    SELECT {_SELECTED} FROM usage_records r LEFT JOIN price_versions p ON p.id = r.price_version_id
    WHERE r.tenant_id = :tenant_id AND r.month = :month AND {IN_TIME}
    ORDER BY r.id""")


async def exported_rows(session: AsyncSession, tenant_id: UUID, month: str) -> AsyncIterator[dict[str, Any]]:
    """The rows of `month`, such as `m:2026-11`, by the names of `COLUMNS`; few are in memory at a time."""
    parameters = {
        "tenant_id": tenant_id,
        "month": month,
        "first_id": uuid7_from(period_start(month) - WRONG_CLOCK),
        "last_id": uuid7_from(period_end(month) + WRONG_CLOCK),
    }
    options = {"yield_per": ROWS_AT_ONCE}
    async for row in await session.stream(_ROWS, parameters, execution_options=options):
        yield dict(row._mapping)
