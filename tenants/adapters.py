"""A tenant's adapters: names and immutable versions. Invariant: every statement is bound to one tenant; a version number, once given, names one digest for ever, and from its first alias on one profile."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.adapter_profile import AdapterProfile, ProfileChange
from loraplex.tenants.errors import (
    AdapterNotFound,
    ProfileFixed,
    VersionNotFound,
    VersionNotReady,
)
from loraplex.tenants.models import Adapter, AdapterVersion
from loraplex.tenants.names import ADAPTER_NAME, check_adapter_name, is_name

MAX_VERSION = 2**31 - 1
GONE_STATES = ("rejected", "deleting")


class AdapterRepository:
    """The adapters of `tenant_id`, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def get_or_create(self, name: str) -> Adapter:
        """Raises `InvalidName`."""
        values = {"tenant_id": self._tenant_id, "name": check_adapter_name(name)}
        statement = insert(Adapter).values(values).on_conflict_do_nothing().returning(Adapter)
        created = (await self._session.scalars(statement)).one_or_none()
        return created or await self.get(name)

    async def get(self, name: str) -> Adapter:
        """Raises `AdapterNotFound`."""
        return await self._one(self._live().where(Adapter.name == name), name)

    async def add_version(
        self,
        name: str,
        *,
        digest: str,
        size_bytes: int,
        rank: int,
        config: dict[str, Any],
        report: dict[str, Any],
        state: str = "ready",
        profile: AdapterProfile | None = None,
    ) -> AdapterVersion:
        """The next version of `name`, or the existing one with the same digest and, if given, the same profile.

        One with the same digest and no alias yet takes the profile over. Raises `AdapterNotFound`.
        """
        adapter = await self.locked(name)
        existing = fitting(await self._versions_with(adapter.id, digest), profile)
        if existing is not None:
            if profile is not None:
                set_profile(existing, profile)
                await self._session.flush()
            return existing
        profile = profile or AdapterProfile()
        record = AdapterVersion(
            tenant_id=self._tenant_id,
            adapter_id=adapter.id,
            version=await self._next_version(adapter.id),
            digest=digest,
            size_bytes=size_bytes,
            rank=rank,
            config=config,
            report=report,
            state=state,
            tool_style=profile.tool_style,
            defaults=dict(profile.defaults),
        )
        self._session.add(record)
        await self._session.flush()
        await self._session.refresh(record, ["created_at"])
        return record

    async def change_profile(self, name: str, version: int, change: ProfileChange) -> AdapterVersion:
        """Changes what `change` holds. Raises `AdapterNotFound`, `VersionNotFound`, or `ProfileFixed` after its first alias."""
        adapter = await self.locked(name)
        record = await self._version(adapter, version)
        if record.aliased_at is not None:
            raise ProfileFixed(
                f"version {version} of adapter {name} has had an alias: its profile is fixed; push the files again with another"
            )
        set_profile(record, replace(profile_of(record), **change))
        await self._session.flush()
        return record

    async def version(self, name: str, version: int) -> AdapterVersion:
        """Raises `AdapterNotFound` or `VersionNotFound`."""
        return await self._version(await self.get(name), version)

    async def versions(self, name: str) -> list[AdapterVersion]:
        """Every version of `name`, oldest first. Raises `AdapterNotFound`."""
        adapter = await self.get(name)
        query = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id)
        return [*await self._session.scalars(query.order_by(AdapterVersion.version))]

    async def delete(self, name: str) -> None:
        """Removes the name at once; its versions stay for the ledger. Raises `AdapterNotFound`."""
        adapter = await self.locked(name)
        adapter.deleted_at = datetime.now(UTC)
        await self._session.flush()

    async def list(self) -> list[Adapter]:
        """The tenant's live adapters, by name."""
        return [*await self._session.scalars(self._live().order_by(Adapter.name))]

    def _live(self) -> Select[Adapter]:
        return select(Adapter).where(Adapter.tenant_id == self._tenant_id, Adapter.deleted_at.is_(None))

    async def locked(self, name: str) -> Adapter:
        """The adapter, kept from others until the transaction ends. Raises `AdapterNotFound`."""
        return await self._one(self._live().where(Adapter.name == name).with_for_update(), name)

    async def _one(self, query: Select[Adapter], name: str) -> Adapter:
        adapter = (await self._session.scalars(query)).one_or_none() if is_name(name, ADAPTER_NAME) else None
        if adapter is None:
            raise AdapterNotFound(f"no adapter named {name[:80]!r}")
        return adapter

    async def _versions_with(self, adapter_id: UUID, digest: str) -> Sequence[AdapterVersion]:
        query = select(AdapterVersion).where(
            AdapterVersion.adapter_id == adapter_id,
            AdapterVersion.digest == digest,
            AdapterVersion.state.not_in(GONE_STATES),
        )
        return (await self._session.scalars(fresh(query.order_by(AdapterVersion.version.desc())))).all()

    async def _next_version(self, adapter_id: UUID) -> int:
        query = select(func.max(AdapterVersion.version)).where(AdapterVersion.adapter_id == adapter_id)
        return (await self._session.scalar(query) or 0) + 1

    async def check_ready(self, adapter: Adapter, version: int) -> None:
        """Raises `VersionNotFound` or `VersionNotReady`."""
        state = (await self._version(adapter, version)).state
        if state != "ready":
            raise VersionNotReady(f"version {version} of adapter {adapter.name} is {state}, not ready")

    async def _version(self, adapter: Adapter, version: int) -> AdapterVersion:
        query = select(AdapterVersion).where(
            AdapterVersion.adapter_id == adapter.id, AdapterVersion.version == version
        )
        known = 1 <= version <= MAX_VERSION
        record = (await self._session.scalars(fresh(query))).one_or_none() if known else None
        if record is None:
            raise VersionNotFound(f"adapter {adapter.name} has no version {version}")
        return record


def fresh(query: Select[AdapterVersion]) -> Select[AdapterVersion]:
    """What the database holds now: its triggers write `aliased_at` behind the session's back."""
    return query.execution_options(populate_existing=True)


def fitting(same: Sequence[AdapterVersion], profile: AdapterProfile | None) -> AdapterVersion | None:
    """Of versions with one digest, newest first: the one with this profile, else one that may still take it."""
    equal = [record for record in same if profile is None or profile_of(record) == profile]
    open_to_change = [record for record in same if record.aliased_at is None]
    return next(iter([*equal, *open_to_change]), None)


def profile_of(version: AdapterVersion) -> AdapterProfile:
    return AdapterProfile(version.tool_style, version.defaults)


def set_profile(version: AdapterVersion, profile: AdapterProfile) -> None:
    version.tool_style, version.defaults = profile.tool_style, dict(profile.defaults)
