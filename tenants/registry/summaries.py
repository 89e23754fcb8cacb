"""Adapters of a tenant at a glance: where `production` leads, the newest version, and versions that need attention.

Invariant: each function is one statement with a bounded answer, however many adapters and versions there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import AdapterVersion

PRODUCTION: Final = "production"
_TARGETS: Final = f"""
    SELECT jsonb_object_agg(t.version::text, t.weight) FROM adapter_aliases l JOIN alias_targets t
        ON t.adapter_id = l.adapter_id AND t.alias = l.alias AND t.generation = l.generation
    WHERE l.adapter_id = a.id AND l.alias = '{PRODUCTION}'"""
_SUMMARIES: Final = text(f"""
SELECT a.id, a.name, v.version, v.state, ({_TARGETS}), count(*) OVER ()
FROM adapters a LEFT JOIN LATERAL (
    SELECT version, state FROM adapter_versions WHERE adapter_id = a.id AND state <> 'deleting'
    ORDER BY version DESC LIMIT 1
) v ON true
WHERE a.tenant_id = :tenant_id AND a.deleted_at IS NULL
ORDER BY array_position(CAST(:first AS uuid[]), a.id), a.created_at DESC, a.id LIMIT :limit""")
# A rejected version needs attention until a newer one has come.
_TROUBLED: Final = text(f"""
SELECT a.name, v.version, v.state, ({_TARGETS}), (
    SELECT c ->> 'name' FROM jsonb_array_elements(v.report -> 'checks') c WHERE NOT (c ->> 'passed')::boolean LIMIT 1
)
FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id
WHERE v.tenant_id = :tenant_id AND a.deleted_at IS NULL AND (
    v.state = 'quarantined' OR v.state = 'rejected' AND NOT EXISTS (
        SELECT FROM adapter_versions n WHERE n.adapter_id = v.adapter_id AND n.version > v.version
    )
)
ORDER BY v.state, v.created_at DESC, v.id LIMIT :limit""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """`production`: version -> weight in percent, empty without that alias. `newest` is None before the first version."""

    id: UUID
    name: str
    newest: int | None
    newest_state: str | None
    production: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledVersion:
    """A quarantined version, or an adapter's newest one that was rejected. `failed_check`: the first one, if any is known."""

    adapter: str
    version: int
    state: str
    production: Mapping[int, int]
    failed_check: str | None


async def served_adapters(
    session: AsyncSession, tenant_id: UUID, first: Sequence[UUID], limit: int
) -> tuple[list[ServedAdapter], int]:
    """At most `limit` adapters, those of `first` before the others, which come newest first; and how many there are."""
    parameters = {"tenant_id": tenant_id, "first": list(first), "limit": limit}
    found = (await session.execute(_SUMMARIES, parameters)).all()
    summaries = [
        ServedAdapter(id=row[0], name=row[1], newest=row[2], newest_state=row[3], production=_targets(row[4]))
        for row in found
    ]
    return summaries, found[0][5] if found else 0


async def troubled_versions(session: AsyncSession, tenant_id: UUID, limit: int) -> list[TroubledVersion]:
    """At most `limit` versions, quarantined ones first."""
    return [
        TroubledVersion(
            adapter=adapter, version=version, state=state, production=_targets(targets), failed_check=check
        )
        for adapter, version, state, targets, check in await session.execute(
            _TROUBLED, {"tenant_id": tenant_id, "limit": limit}
        )
    ]


def _targets(stored: Mapping[str, int] | None) -> Mapping[int, int]:
    return dict(sorted((int(version), weight) for version, weight in (stored or {}).items()))


async def registered_digest(
    session: AsyncSession, adapter_id: UUID | None, version: int | None
) -> str | None:
    """The digest of a version as it is registered; None if there is no such version any more."""
    query = select(AdapterVersion.digest)
    query = query.where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.version == version)
    digest: str | None = await session.scalar(query)
    return digest
