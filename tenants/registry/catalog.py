"""Lists a tenant's adapters with a summary of their versions and of their `production` alias, a page in one statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import default_limits
from loraplex.tenants.records import Record
from loraplex.tenants.registry.storage_quota import StorageQuota

_PAGE: Final = text("""
SELECT a.id, a.name, a.description, coalesce(p.targets, '{}') AS production, n.version, n.state, s.versions, s.size_bytes,
    greatest(a.created_at, n.created_at, p.updated_at) AS changed_at
FROM adapters a
LEFT JOIN LATERAL (
    SELECT v.version, v.state, v.created_at FROM adapter_versions v
    WHERE v.adapter_id = a.id AND v.blob_deleted_at IS NULL ORDER BY v.version DESC LIMIT 1
) n ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS versions, coalesce(sum(v.size_bytes) FILTER (WHERE v.state <> 'rejected'), 0) AS size_bytes
    FROM adapter_versions v WHERE v.adapter_id = a.id AND v.blob_deleted_at IS NULL
) s ON true
LEFT JOIN LATERAL (
    SELECT jsonb_object_agg(t.version, t.weight) AS targets, l.updated_at
    FROM adapter_aliases l JOIN alias_targets t USING (adapter_id, alias, generation)
    WHERE l.adapter_id = a.id AND l.alias = 'production' GROUP BY l.updated_at
) p ON true
WHERE a.tenant_id = :tenant_id AND a.deleted_at IS NULL AND position(:search IN a.name) > 0 AND a.name > :after
    AND (:state = '' OR n.state = :state)
ORDER BY a.name LIMIT :limit
""")
_DIGESTS: Final = text("""
SELECT l.adapter_id, array_agg(v.digest) FROM adapter_aliases l
JOIN alias_targets t USING (adapter_id, alias, generation)
JOIN adapter_versions v ON v.adapter_id = t.adapter_id AND v.version = t.version
WHERE l.tenant_id = :tenant_id AND l.alias = 'production' AND l.adapter_id = ANY(:ids) AND v.digest IS NOT NULL
GROUP BY l.adapter_id
""")
_ROOM: Final = text("""
SELECT (SELECT count(*) FROM adapters WHERE tenant_id = :tenant_id AND deleted_at IS NULL),
    (SELECT max_adapters FROM quotas WHERE tenant_id = :tenant_id AND api_key_id IS NULL AND adapter_id IS NULL),
    (SELECT max_adapter_bytes FROM quotas WHERE tenant_id = :tenant_id AND api_key_id IS NULL AND adapter_id IS NULL)
""")


class AdapterSummary(Record):
    """`production`: version -> weight in percent, empty without that alias. `version` and `state`: the newest version, None
    without one. `size_bytes` counts the versions with files.
    """

    id: UUID
    name: str
    description: str
    production: dict[int, int]
    version: int | None
    state: str | None
    versions: int
    size_bytes: int
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class AdapterSpace:
    """What a tenant's adapters use, open uploads included, and the limits in force."""

    adapters: int
    max_adapters: int
    used_bytes: int
    max_bytes: int


class AdapterCatalog:
    """The live adapters of `tenant_id`, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def page(self, search: str, state: str, after: str, limit: int) -> Sequence[AdapterSummary]:
        """At most `limit` adapters by name, behind the name `after`, whose names contain `search` and whose newest version has the
        state. An empty text selects all.
        """
        values = {"search": search, "state": state, "after": after, "limit": limit}
        rows = await self._session.execute(_PAGE, {"tenant_id": self._tenant_id, **values})
        return [AdapterSummary.model_validate(row) for row in rows]

    async def production_digests(self, ids: Sequence[UUID]) -> dict[UUID, list[str]]:
        """The digests that `production` leads to, by adapter; an adapter without that alias is absent."""
        rows = await self._session.execute(_DIGESTS, {"tenant_id": self._tenant_id, "ids": [*ids]})
        return {adapter_id: digests for adapter_id, digests in rows}

    async def space(self) -> AdapterSpace:
        """What the adapters use of the tenant's limits: its own, else the installation's."""
        row = (await self._session.execute(_ROOM, {"tenant_id": self._tenant_id})).one()
        limits = default_limits(self._session)
        return AdapterSpace(
            row[0],
            limits.in_force("max_adapters", row[1]),
            await StorageQuota(self._session, self._tenant_id).used(),
            limits.in_force("max_adapter_bytes", row[2]),
        )
