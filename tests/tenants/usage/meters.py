"""Rollups for tests of the meter export."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import text

from loraplex.tenants.database import Database

ADD = text("""
    INSERT INTO usage_rollups AS u (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency, requests,
        uncached_tokens, cached_tokens, completion_tokens, reasoning_tokens, amount_pico)
    VALUES (:tenant, :hour, :adapter, :tenant, :tenant, 'USD', 1, :uncached, :cached, :completion, :reasoning, 1)
    ON CONFLICT (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency) DO UPDATE SET
        uncached_tokens = u.uncached_tokens + excluded.uncached_tokens,
        cached_tokens = u.cached_tokens + excluded.cached_tokens,
        completion_tokens = u.completion_tokens + excluded.completion_tokens,
        reasoning_tokens = u.reasoning_tokens + excluded.reasoning_tokens
""")


async def use(
    database: Database,
    tenant_id: UUID,
    hour: datetime,
    tokens: tuple[int, int, int],
    adapter_id: UUID | None = None,
    reasoning: int = 0,
) -> None:
    """Add to a tenant's rollup of an hour. `tokens`: uncached, cached, completion, which includes `reasoning`."""
    uncached, cached, completion = tokens
    row = {"tenant": tenant_id, "hour": hour, "adapter": adapter_id or tenant_id, "reasoning": reasoning}
    async with database.as_writer() as session:
        await session.execute(ADD, {**row, "uncached": uncached, "cached": cached, "completion": completion})
