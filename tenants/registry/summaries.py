"""Adapters of a tenant at a glance: where `production` leads, the newest version, and versions that need attention.

Invariant: each function is one statement with a bounded answer, however many adapters and versions there are.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.records import Record

PRODUCTION: Final = "production"
_TARGETS: Final = f"""
    SELECT coalesce(jsonb_object_agg(t.version::text, t.weight), '{{}}') FROM adapter_aliases l JOIN alias_targets t
        ON t.adapter_id = l.adapter_id AND t.alias = l.alias AND t.generation = l.generation
    WHERE l.adapter_id = a.id AND l.alias = '{PRODUCTION}'"""
_SUMMARIES: Final = text(f"""
SELECT a.id, a.name, v.version AS newest, v.state AS newest_state, ({_TARGETS}) AS production, count(*) OVER () AS total
FROM adapters a LEFT JOIN LATERAL (
    SELECT version, state FROM adapter_versions WHERE adapter_id = a.id AND state <> 'deleting'
    ORDER BY version DESC LIMIT 1
) v ON true
WHERE a.tenant_id = :tenant_id AND a.deleted_at IS NULL
ORDER BY array_position(CAST(:first AS uuid[]), a.id), a.created_at DESC, a.id LIMIT :limit""")
# A rejected version needs attention until a newer one has come.
_TROUBLED: Final = text(f"""
SELECT a.name AS adapter, v.version, v.state, ({_TARGETS}) AS production, (
    SELECT c ->> 'name' FROM jsonb_array_elements(v.report -> 'checks') c WHERE NOT (c ->> 'passed')::boolean LIMIT 1
) AS failed_check
FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id
WHERE v.tenant_id = :tenant_id AND a.deleted_at IS NULL AND (
    v.state = 'quarantined' OR v.state = 'rejected' AND NOT EXISTS (
        SELECT FROM adapter_versions n WHERE n.adapter_id = v.adapter_id AND n.version > v.version
    )
)
ORDER BY v.state, v.created_at DESC, v.id LIMIT :limit""")


class ServedAdapter(Record):
    """`production`: version -> weight in percent, empty without that alias. `newest` is None before the first version."""

    id: UUID
    name: str
    newest: int | None
    newest_state: str | None
    production: dict[int, int]


class TroubledVersion(Record):
    """A quarantined version, or an adapter's newest one that was rejected. `failed_check`: the first one, if any is known."""

    adapter: str
    version: int
    state: str
    production: dict[int, int]
    failed_check: str | None


async def served_adapters(
    session: AsyncSession, tenant_id: UUID, first: Sequence[UUID], limit: int
) -> tuple[list[ServedAdapter], int]:
    """At most `limit` adapters, those of `first` before the others, which come newest first; and how many there are."""
    parameters = {"tenant_id": tenant_id, "first": list(first), "limit": limit}
    found = (await session.execute(_SUMMARIES, parameters)).all()
    return [ServedAdapter.model_validate(row) for row in found], found[0].total if found else 0


async def troubled_versions(session: AsyncSession, tenant_id: UUID, limit: int) -> list[TroubledVersion]:
    """At most `limit` versions, quarantined ones first."""
    found = await session.execute(_TROUBLED, {"tenant_id": tenant_id, "limit": limit})
    return [TroubledVersion.model_validate(row) for row in found]


async def registered_digest(
    session: AsyncSession, adapter_id: UUID | None, version: int | None
) -> str | None:
    """The digest of a version as it is registered; None if there is no such version any more."""
    query = select(AdapterVersion.digest)
    query = query.where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.version == version)
    digest: str | None = await session.scalar(query)
    return digest
