"""Limits of tenants, which an operator sets, and of keys and adapters, which their tenant narrows itself. Invariant: when set,
these are never above the tenant's own. What has no row has no limits, and is read as an unchanged row.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias
from uuid import UUID

from sqlalchemy import and_, exists, func, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex.tenants.api_keys.key_format import is_key_id
from loraplex.tenants.api_keys.keys import alive
from loraplex.tenants.database import default_limits
from loraplex.tenants.errors import InvalidField, KeyNotFound
from loraplex.tenants.models import LIMIT_COLUMNS, Adapter, ApiKey, Quota, Tenant
from loraplex.tenants.quotas.limits import TENANT_ONLY, Level, QuotaLimits, Subject, wider
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.storage_quota import StorageQuota

FIRST_REVISION: Final = 1
REPLACED: Final = text("""
WITH RECURSIVE replaced (id, key_id) AS (
    SELECT o.id, o.key_id FROM api_keys o JOIN api_keys k ON o.replaced_by = k.id WHERE k.id = :id AND k.replaced_by IS NULL
    UNION ALL SELECT k.id, k.key_id FROM api_keys k JOIN replaced r ON k.replaced_by = r.id
) SELECT id, key_id FROM replaced
""")
Place: TypeAlias = tuple[str, str]
"""The level and the name of a subject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaState:
    """The limits of one subject. `name`: the tenant's, the public id of the key or of the group's root, or the adapter's. `revision`
    is the ETag.
    """

    level: Level
    subject_id: UUID
    name: str
    limits: QuotaLimits
    revision: int

    @property
    def place(self) -> Place:
        return self.level, self.name

    @property
    def subject(self) -> Subject:
        return Subject(self.level, self.subject_id, self.limits)


@dataclass(frozen=True, slots=True)
class ChangedQuota:
    """The limits of a key, by its public id, before and after a change of those of the key that replaced it."""

    key_id: str
    before: QuotaLimits
    after: QuotaLimits


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """A limit that only a tenant has: as in force, where null is the installation's default, and its use."""

    limit: int
    used: int


class QuotaRepository:
    """The limits of `tenant_id` at all levels, seen by one session. Only an operator sets the tenant's own."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def tenant(self) -> QuotaState:
        """The tenant's own limits."""
        own = and_(Quota.tenant_id == Tenant.id, Quota.api_key_id.is_(None), Quota.adapter_id.is_(None))
        query = select(Tenant.name, Quota).outerjoin(Quota, own).where(Tenant.id == self._tenant_id)
        found = await self._session.execute(query.execution_options(populate_existing=True))
        name, row = found.one()
        return state_of("tenant", self._tenant_id, name, row)

    async def key(self, key_id: str) -> QuotaState:
        """Raises `KeyNotFound`."""
        query = select(ApiKey.id).where(ApiKey.tenant_id == self._tenant_id, ApiKey.key_id == key_id)
        found = await self._session.scalar(query) if is_key_id(key_id) else None
        if found is None:
            raise KeyNotFound(f"no key {key_id[:40]!r}")
        return state_of("key", found, key_id, await self._row(found, None))

    async def group_of(self, key_id: str) -> QuotaState | None:
        """The limits that a key shares with the root above it; None without one."""
        root, key = aliased(ApiKey), ApiKey
        query = select(root.id, root.key_id).join(key, key.limit_root == root.id)
        of_key = (key.tenant_id == self._tenant_id, key.key_id == key_id, key.limit_root != key.id)
        found = (await self._session.execute(query.where(*of_key))).one_or_none()
        if found is None:
            return None
        return state_of("group", found.id, found.key_id, await self._row(found.id, None))

    async def adapter(self, name: str) -> QuotaState:
        """Raises `AdapterNotFound`."""
        adapter = await AdapterRepository(self._session, self._tenant_id).get(name)
        return state_of("adapter", adapter.id, adapter.name, await self._row(None, adapter.id))

    async def page(self, after: Place | None, limit: int) -> list[QuotaState]:
        """At most `limit` subjects after that place: the tenant, then its working keys, and as groups those that bind working keys,
        then its adapters, each by name, if their limits were ever set.
        """
        level, name = after or ("tenant", "")
        states = [await self.tenant()] if after is None else []
        below, now = aliased(ApiKey), datetime.now(UTC)
        bound = below.limit_root == ApiKey.id, below.id != ApiKey.id, alive(now, below)
        is_group = exists(below.id).where(*bound)
        key = and_(
            ApiKey.id.is_not(None),
            or_(alive(now), is_group),
            ApiKey.key_id > (name if level in ("key", "group") else ""),
        )
        adapter = and_(
            *(Adapter.id.is_not(None), Adapter.deleted_at.is_(None)),
            Adapter.name > (name if level == "adapter" else ""),
        )
        query = (
            select(Quota, ApiKey.id, ApiKey.key_id, is_group, Adapter.id, Adapter.name)
            .outerjoin(ApiKey, Quota.api_key_id == ApiKey.id)
            .outerjoin(Adapter, Quota.adapter_id == Adapter.id)
            .where(Quota.tenant_id == self._tenant_id, adapter if level == "adapter" else or_(key, adapter))
            .order_by(ApiKey.id.is_(None), ApiKey.key_id, Adapter.name)
        )
        found = await self._session.execute(query.limit(limit - len(states)))
        return states + [
            state_of("adapter", adapter_id, adapter_name, row)
            if row.api_key_id is None
            else state_of("group" if binds else "key", api_key_id, key_id, row)
            for row, api_key_id, key_id, binds, adapter_id, adapter_name in found
        ]

    async def key_names(self, key_ids: Collection[str]) -> dict[str, str]:
        """The names of the tenant's keys by their public ids."""
        if not key_ids:
            return {}
        query = select(ApiKey.key_id, ApiKey.name).where(ApiKey.tenant_id == self._tenant_id)
        found = await self._session.execute(query.where(ApiKey.key_id.in_(key_ids)))
        return {key_id: name for key_id, name in found}

    async def locked(self, state: QuotaState) -> Quota:
        """The row of these limits, created if missing, and locked until the transaction ends."""
        api_key_id = state.subject_id if state.level == "key" else None
        adapter_id = state.subject_id if state.level == "adapter" else None
        subject = {"tenant_id": self._tenant_id, "api_key_id": api_key_id, "adapter_id": adapter_id}
        await self._session.execute(insert(Quota).values(**subject).on_conflict_do_nothing())
        row = await self._row(api_key_id, adapter_id, locked=True)
        if row is None:
            raise InvalidField("level", "a tenant sets only the limits of keys and adapters")
        return row

    async def narrow(self, row: Quota, limits: QuotaLimits) -> Sequence[ChangedQuota]:
        """Set all limits of a locked row. The keys that this one replaced are at the root of what it shares with them: they follow in
        limits that were the same, and in narrower ones. Return what changed of them. A key that was replaced itself changes no other.

        Raises `InvalidField` for a limit above the tenant's.
        """
        for name in TENANT_ONLY:
            if limits.get(name) is not None:
                raise InvalidField(name, f"{name} is a limit of the tenant as a whole")
        above = (await self.tenant()).limits
        for name in wider(limits, above):
            raise InvalidField(name, f"{name} must be at most the tenant's, which is {above.get(name)}")
        before, changed = QuotaLimits.of(row), []
        await self.set(row, limits)
        if row.api_key_id is not None:
            for id, key_id in (await self._session.execute(REPLACED, {"id": row.api_key_id})).all():
                old = await self.locked(state_of("key", id, key_id, None))
                had = QuotaLimits.of(old)
                after = QuotaLimits(**{name: _following(had, before, limits, name) for name in LIMIT_COLUMNS})
                await self.set(old, after)
                if after != had:
                    changed.append(ChangedQuota(key_id, had, after))
        return changed

    async def set(self, row: Quota, limits: QuotaLimits) -> None:
        """Set all limits of a locked row, without a look at others."""
        for name, value in limits.items():
            setattr(row, name, value)
        await self._session.flush()

    async def resources(self, own: QuotaLimits) -> Mapping[str, ResourceUse]:
        """The tenant's adapters, their bytes with open uploads, and its working keys that were not replaced, as the limits
        count them, by the limits' names. `own`: the limits of `tenant()`.
        """
        adapters = select(func.count(Adapter.id)).where(
            Adapter.tenant_id == self._tenant_id, Adapter.deleted_at.is_(None)
        )
        keys = select(func.count(ApiKey.id)).where(
            ApiKey.tenant_id == self._tenant_id,
            ApiKey.kind == "key",
            ApiKey.revoked_at.is_(None),
            ApiKey.replaced_by.is_(None),
            ApiKey.expires_at.is_(None) | (ApiKey.expires_at > func.now()),
        )
        bytes_used = StorageQuota(self._session, self._tenant_id).bytes_used()
        columns = (
            adapters.scalar_subquery().label("max_adapters"),
            bytes_used.label("max_adapter_bytes"),
            keys.scalar_subquery().label("max_keys"),
        )
        used = (await self._session.execute(select(*columns))).one()._mapping
        defaults = default_limits(self._session)
        return {name: ResourceUse(defaults.in_force(name, own.get(name)), int(used[name])) for name in used}

    async def _row(
        self, api_key_id: UUID | None, adapter_id: UUID | None, *, locked: bool = False
    ) -> Quota | None:
        query = select(Quota).where(
            Quota.tenant_id == self._tenant_id,
            Quota.api_key_id.is_not_distinct_from(api_key_id),
            Quota.adapter_id.is_not_distinct_from(adapter_id),
        )
        query = query.execution_options(populate_existing=True)
        return (await self._session.scalars(query.with_for_update() if locked else query)).one_or_none()


def state_of(level: Level, subject_id: UUID, name: str, row: Quota | None) -> QuotaState:
    revision = FIRST_REVISION if row is None else row.revision
    return QuotaState(
        level=level, subject_id=subject_id, name=name, limits=QuotaLimits.of(row), revision=revision
    )


def _following(had: QuotaLimits, before: QuotaLimits, after: QuotaLimits, name: str) -> int | None:
    """The limit of a key that had others when those of its successor changed: a limit that was set apart is not widened."""
    own, new = had.get(name), after.get(name)
    follows = own == before.get(name) or (new is not None and (own is None or new < own))
    return new if follows else own
