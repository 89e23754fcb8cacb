"""A tenant's adapters in a list: production target, newest version, bytes, requests of 24 hours, residency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.adapters.residency import Residency, Tier
from loraplex.platform.web.keys.queries import hours_until
from loraplex.tenants.ledger.recent_requests import hourly_requests
from loraplex.tenants.models import VERSION_STATES
from loraplex.tenants.registry.catalog import AdapterCatalog, AdapterSummary
from loraplex.tenants.registry.storage_quota import StorageQuota

__all__ = ["STATES", "AdapterPage", "AdapterRow", "Space", "adapter_page", "space"]
PAGE: Final = 50
STATES: Final = tuple(state for state in VERSION_STATES if state not in ("uploading", "deleting"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """`production`: version -> weight in percent, empty without that alias. `version` and `state`: the newest version's.

    `tier`: the slowest memory tier among the versions of `production`; None without one, or while no engine answers.
    """

    name: str
    description: str
    production: Mapping[int, int]
    version: int | None
    state: str | None
    versions: int
    size_bytes: int
    requests_24h: int
    tier: Tier | None
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """`after`: the name that the next page follows, None on the last one."""

    adapters: Sequence[AdapterRow]
    after: str | None


@dataclass(frozen=True, slots=True)
class Space:
    """What a tenant's adapters use, open uploads included, and the limits in force."""

    adapters: int
    max_adapters: int
    used_bytes: int
    max_bytes: int


async def adapter_page(
    session: AsyncSession,
    tenant_id: UUID,
    residency: Residency,
    *,
    search: str = "",
    state: str = "",
    after: str = "",
) -> AdapterPage:
    """Return at most 50 adapters by name, behind the name `after`. `search`: a part of the name; `state`: of the newest version."""
    catalog = AdapterCatalog(session, tenant_id)
    found = await catalog.page(_text(search), _text(state), _text(after), PAGE + 1)
    shown = found[:PAGE]
    ids = [adapter.id for adapter in shown]
    counts = await hourly_requests(session, tenant_id, "adapter", ids, hours_until(datetime.now(UTC))[0])
    digests = await catalog.production_digests(ids)
    rows = [
        _row(each, sum(counts[each.id].values()), residency.tier(digests.get(each.id, ()))) for each in shown
    ]
    return AdapterPage(rows, shown[-1].name if len(found) > PAGE else None)


async def space(session: AsyncSession, tenant_id: UUID) -> Space:
    """Return what the tenant's adapters use of its limits."""
    room = await AdapterCatalog(session, tenant_id).room()
    used = await StorageQuota(session, tenant_id).used()
    return Space(room.adapters, room.max_adapters, used, room.max_bytes)


def _row(adapter: AdapterSummary, requests: int, tier: Tier | None) -> AdapterRow:
    return AdapterRow(
        name=adapter.name,
        description=adapter.description,
        production=adapter.production or {},
        version=adapter.version,
        state=adapter.state,
        versions=adapter.versions,
        size_bytes=adapter.size_bytes,
        requests_24h=requests,
        tier=tier,
        changed_at=adapter.changed_at,
    )


def _text(text: str) -> str:
    """Drop what no text of the database holds."""
    return text.replace("\0", "")
