"""A tenant's adapters in a list: production target, newest version, bytes, requests of 24 hours, residency."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.adapters.residency import Residency, Tier
from loraplex.platform.web.keys.queries import hours_until
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.tenants.ledger.recent_requests import hourly_requests
from loraplex.tenants.models import VERSION_STATES
from loraplex.tenants.pages import Slice
from loraplex.tenants.registry.catalog import AdapterCatalog, AdapterSpace, AdapterSummary

STATES: Final = tuple(state for state in VERSION_STATES if state not in ("uploading", "deleting"))


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """`tier`: the slowest memory tier among the versions of `production`; None without one, or while no engine answers."""

    summary: AdapterSummary
    requests_24h: int
    tier: Tier | None


BY_NAME: Final[SortOrder[ListedAdapter, str]] = by_text(lambda adapter: adapter.summary.name)


async def listed_adapters(
    session: AsyncSession,
    tenant_id: UUID,
    residency: Residency,
    part: Slice[str],
    *,
    search: str = "",
    state: str = "",
) -> list[ListedAdapter]:
    """Return adapters by name. `search`: a part of the name; `state`: of the newest version; "" for any."""
    catalog = AdapterCatalog(session, tenant_id)
    found = await catalog.page(_text(search), _text(state), part.after or "", part.fetch)
    ids = [summary.id for summary in found]
    counts = await hourly_requests(session, tenant_id, "adapter", ids, hours_until(datetime.now(UTC))[0])
    digests = await catalog.production_digests(ids)
    return [
        ListedAdapter(summary, sum(counts[summary.id].values()), residency.tier(digests.get(summary.id, ())))
        for summary in found
    ]


async def space(session: AsyncSession, tenant_id: UUID) -> AdapterSpace:
    """Return what the tenant's adapters use of its limits."""
    return await AdapterCatalog(session, tenant_id).space()


def _text(text: str) -> str:
    """Drop what no text of the database holds."""
    return text.replace("\0", "")
