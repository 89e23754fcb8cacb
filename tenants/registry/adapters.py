"""Adapters of a tenant: names, profiles and immutable versions.

Invariant: every statement is bound to one tenant. A version number names one digest for ever, and one profile from its first
alias on. A profile contains choices from closed sets and no text, so that it cannot write into a prompt.
"""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import default_limits, lock
from loraplex.tenants.errors import (
    AdapterNotFound,
    CountReached,
    InvalidName,
    NameTaken,
    ProfileFixed,
    RevisionMoved,
    VersionNotFound,
    VersionNotReady,
)
from loraplex.tenants.models import Adapter, AdapterVersion, Quota, Tenant
from loraplex.tenants.names import ADAPTER_NAME, check_adapter_name, is_name
from loraplex.tenants.registry.records import MAX_VERSION, SERVING_STATES, AdapterProfile, ProfileChange

GONE_STATES = ("rejected", "deleting")


class AdapterRepository:
    """The adapters of `tenant_id`, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def create(self, name: str, description: str = "", base_model: str | None = None) -> Adapter:
        """Create an adapter. `base_model`: the name under which the base model is served.

        Raises `InvalidName`, `NameTaken` or `CountReached`.
        """
        same = self._live().where(Adapter.name == name)
        if name == base_model and await self._session.scalar(same) is None:
            raise InvalidName(
                "name", f"name {name!r} is that of the base model: requests would never reach it"
            )
        values = {"name": check_adapter_name(name), "description": description}
        await self._require_room()
        statement = insert(Adapter).values(**values, tenant_id=self._tenant_id).on_conflict_do_nothing()
        adapter = (await self._session.scalars(statement.returning(Adapter))).one_or_none()
        if adapter is None:
            raise NameTaken(f"an adapter named {name} exists already")
        return adapter

    async def get(self, name: str) -> Adapter:
        """Raises `AdapterNotFound`."""
        return await self._one(self._live().where(Adapter.name == name), name)

    async def equal_version(
        self, name: str, digest: str, profile: AdapterProfile | None
    ) -> AdapterVersion | None:
        """The version of `name` with this content and, if given, this profile or one that may still change.

        It stays until the transaction ends. Raises `AdapterNotFound`.
        """
        adapter = await self.locked(name)
        query = select(AdapterVersion).where(
            AdapterVersion.adapter_id == adapter.id,
            AdapterVersion.digest == digest,
            AdapterVersion.state.not_in(GONE_STATES),
        )
        same = (await self._session.scalars(fresh(query.order_by(AdapterVersion.version.desc())))).all()
        equal = [record for record in same if profile is None or profile_of(record) == profile]
        open_to_change = [record for record in same if record.aliased_at is None]
        return next(iter([*equal, *open_to_change]), None)

    async def change_profile(
        self, name: str, version: int, change: ProfileChange, seen: int | None = None
    ) -> AdapterVersion:
        """Change a version's profile. `seen` is the revision that the caller has read; None for any.

        Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, or `ProfileFixed` after its first alias.
        """
        adapter = await self.locked(name)
        record = await self.version_of(adapter, version)
        require_revision(record, seen)
        if record.aliased_at is not None:
            raise ProfileFixed(
                f"version {version} of adapter {name} has had an alias: its profile is fixed; push the files again with another"
            )
        set_profile(record, replace(profile_of(record), **change))
        await self._session.flush()
        return record

    async def version(self, name: str, version: int) -> AdapterVersion:
        """Raises `AdapterNotFound` or `VersionNotFound`."""
        query = self._present(name).where(AdapterVersion.version == version)
        known = 1 <= version <= MAX_VERSION
        record = (await self._session.scalars(fresh(query))).one_or_none() if known else None
        # What is missing is asked only then.
        return record or await self.version_of(await self.get(name), version)

    async def versions(self, name: str) -> list[AdapterVersion]:
        """Every version of `name` with files, oldest first. Raises `AdapterNotFound`."""
        adapter = await self.get(name)
        return [*await self._session.scalars(present(adapter).order_by(AdapterVersion.version))]

    async def version_page(self, name: str, before: int | None, limit: int) -> Sequence[AdapterVersion]:
        """At most `limit` versions, newest first, older than `before`. Raises `AdapterNotFound`."""
        query = self._present(name).order_by(AdapterVersion.version.desc()).limit(limit)
        if before is not None:
            query = query.where(AdapterVersion.version < before)
        found = (await self._session.scalars(query)).all()
        if not found:
            await self.get(name)
        return found

    async def serving(self, digest: str) -> Sequence[AdapterVersion]:
        """The versions with these weights, of any adapter, that are ready or could be."""
        query = select(AdapterVersion).where(
            AdapterVersion.tenant_id == self._tenant_id,
            AdapterVersion.digest == digest,
            AdapterVersion.state.in_(SERVING_STATES),
        )
        return (await self._session.scalars(query.order_by(AdapterVersion.id))).all()

    async def list(self) -> list[Adapter]:
        """The tenant's live adapters, by name."""
        return [*await self._session.scalars(self._live().order_by(Adapter.name))]

    async def page(self, after: str | None, limit: int, search: str = "") -> Sequence[Adapter]:
        """At most `limit` live adapters by name, those behind the name `after`, of which the name contains `search`."""
        query = self._live().order_by(Adapter.name).limit(limit)
        query = query.where(Adapter.name.contains(search, autoescape=True))
        if after is not None:
            query = query.where(Adapter.name > after)
        return (await self._session.scalars(query)).all()

    async def _require_room(self) -> None:
        """Check `max_adapters` under an advisory lock until the transaction ends: a tenant's role may lock no row of its quota."""
        await lock(self._session, f"max_adapters:{self._tenant_id}")
        own = (Quota.tenant_id == self._tenant_id, Quota.api_key_id.is_(None), Quota.adapter_id.is_(None))
        set_limit = await self._session.scalar(select(Quota.max_adapters).where(*own))
        limit = default_limits(self._session).in_force("max_adapters", set_limit)
        count = await self._session.scalar(select(func.count()).select_from(self._live().subquery()))
        if (count or 0) >= limit:
            raise CountReached("max_adapters", f"max_adapters of the tenant is {limit}: delete one first")

    def _live(self) -> Select[Adapter]:
        return select(Adapter).where(Adapter.tenant_id == self._tenant_id, Adapter.deleted_at.is_(None))

    def _present(self, name: str) -> Select[AdapterVersion]:
        """The versions of the live adapter `name`, as `present`; none for what cannot be a name."""
        of_name = Adapter.name == (name if is_name(name, ADAPTER_NAME) else "")
        query = select(AdapterVersion).join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        own = (Adapter.tenant_id == self._tenant_id, Adapter.deleted_at.is_(None), of_name)
        return query.where(*own, AdapterVersion.blob_deleted_at.is_(None))

    async def locked(self, name: str) -> Adapter:
        """The adapter, locked until the transaction ends. Raises `AdapterNotFound`."""
        return await self._one(self._live().where(Adapter.name == name).with_for_update(), name)

    async def _one(self, query: Select[Adapter], name: str) -> Adapter:
        adapter = (await self._session.scalars(query)).one_or_none() if is_name(name, ADAPTER_NAME) else None
        if adapter is None:
            raise AdapterNotFound(f"no adapter named {name[:80]!r}")
        return adapter

    async def check_ready(self, adapter: Adapter, version: int) -> None:
        """Raises `VersionNotFound` or `VersionNotReady`."""
        state = (await self.version_of(adapter, version)).state
        if state != "ready":
            raise VersionNotReady(f"version {version} of adapter {adapter.name} is {state}, not ready")

    async def version_of(self, adapter: Adapter, version: int) -> AdapterVersion:
        """Raises `VersionNotFound`, also if its files are removed."""
        query = present(adapter).where(AdapterVersion.version == version)
        known = 1 <= version <= MAX_VERSION
        record = (await self._session.scalars(fresh(query))).one_or_none() if known else None
        if record is None:
            raise VersionNotFound(f"adapter {adapter.name} has no version {version}")
        return record


async def tenants_with(session: AsyncSession, name: str, limit: int) -> Sequence[str]:
    """The names of at most `limit` tenants that have an adapter `name`; for an operator's session."""
    query = select(Tenant.name).join(Adapter, Adapter.tenant_id == Tenant.id)
    query = query.where(Adapter.name == name, Adapter.deleted_at.is_(None))
    return (await session.scalars(query.order_by(Tenant.name).limit(limit))).all()


def present(adapter: Adapter) -> Select[AdapterVersion]:
    """Include a deleted version until its files are removed."""
    return select(AdapterVersion).where(
        AdapterVersion.adapter_id == adapter.id, AdapterVersion.blob_deleted_at.is_(None)
    )


def require_revision(record: Adapter | AdapterVersion, seen: int | None) -> None:
    """Raises `RevisionMoved` unless `seen` is the record's revision, or None. The caller has locked it until the transaction ends."""
    if seen is not None and record.revision != seen:
        raise RevisionMoved("it has changed since it was read: read it again, then repeat the change")


def fresh(query: Select[AdapterVersion]) -> Select[AdapterVersion]:
    """Read the row again: triggers of the database write `aliased_at` without the session's knowledge."""
    return query.execution_options(populate_existing=True)


def profile_of(version: AdapterVersion) -> AdapterProfile:
    return AdapterProfile(version.tool_style, version.defaults, version.reasoning_style, version.decision)


def set_profile(version: AdapterVersion, profile: AdapterProfile) -> None:
    version.tool_style, version.reasoning_style = profile.tool_style, profile.reasoning_style
    version.defaults = dict(profile.defaults)
    version.decision = None if profile.decision is None else dict(profile.decision)
