"""What a month's usage would have cost under a draft of a rate card. Invariant: nothing is written.

A draft is taken to be in force all month. It prices what it covers, unless a more specific card did.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import RatedTotalDocument, RatedUsageDocument
from loraplex.tenants.billing.rate_cards import scope_of

# The tier of a request is known where a tier's card priced it; elsewhere that of its tenant now stands for it.
RATED: Final = text("""
WITH specificity (scope, rank) AS (VALUES ('all', 0), ('tier', 1), ('tenant', 2), ('adapter', 3)),
rated AS (
    SELECT u.tenant_id, t.name, u.currency, u.amount_pico,
        u.uncached_tokens::numeric * CAST(:prompt AS bigint) + u.cached_tokens::numeric * CAST(:cached_prompt AS bigint)
            + (u.completion_tokens - u.reasoning_tokens)::numeric * CAST(:completion AS bigint)
            + u.reasoning_tokens::numeric * CAST(:reasoning AS bigint) AS draft_pico,
        u.currency = :currency
            AND coalesce(CAST(:tenant_id AS uuid), u.tenant_id) = u.tenant_id
            AND (CAST(:adapter_name AS text) IS NULL OR a.name = :adapter_name)
            AND coalesce(CAST(:tier AS text), c.tier, t.tier) = coalesce(c.tier, t.tier)
            AND coalesce(s.rank, 0) <= (SELECT rank FROM specificity WHERE scope = :scope) AS is_covered
    FROM monthly_rollups u
    JOIN tenants t ON t.id = u.tenant_id
    LEFT JOIN adapters a ON a.tenant_id = u.tenant_id AND a.id = u.adapter_id
    LEFT JOIN price_versions v ON v.id = u.price_version_id
    LEFT JOIN rate_cards c ON c.id = v.rate_card_id
    LEFT JOIN specificity s ON s.scope = c.scope
    WHERE u.month = :month
)
SELECT tenant_id, name, currency, sum(amount_pico), sum(CASE WHEN is_covered THEN draft_pico ELSE amount_pico END)
FROM rated GROUP BY tenant_id, name, currency ORDER BY tenant_id, currency
""")


def totals(rated: Sequence[RatedUsageDocument]) -> list[RatedTotalDocument]:
    """The sums by currency, in the order of their codes."""
    return [
        RatedTotalDocument(
            currency=currency,
            billed_pico=sum(each.billed_pico for each in rated if each.currency == currency),
            draft_pico=sum(each.draft_pico for each in rated if each.currency == currency),
        )
        for currency in sorted({each.currency for each in rated})
    ]


async def rate(
    session: AsyncSession, key: CardKey, price: Price, month: datetime
) -> Sequence[RatedUsageDocument]:
    """Rate the usage of the month that begins at `month` of every tenant that has any, as an operator; in the order of ids."""
    found = await session.execute(
        RATED,
        {
            "scope": scope_of(key),
            **key._asdict(),
            "prompt": price.prompt,
            "cached_prompt": price.cached_prompt,
            "completion": price.completion,
            "reasoning": price.of_reasoning,
            "month": month,
        },
    )
    return [
        RatedUsageDocument(
            tenant_id=tenant_id,
            name=name,
            currency=currency,
            billed_pico=int(billed_pico),
            draft_pico=int(draft_pico),
        )
        for tenant_id, name, currency, billed_pico, draft_pico in found
    ]
