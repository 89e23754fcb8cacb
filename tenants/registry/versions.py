"""The state machine of adapter versions. Invariant: a move starts from the state that its caller has read, under the
adapter's lock, and writes an audit entry in the same transaction.

    uploading ──> validating ──> ready <──> deprecated
        │             │           │ ^            │
        │             │           v │            │
        │             │       quarantined <──────┤
        v             v           │              │
        └─> rejected <┘           │              │
               └──────────> deleting <───────────┘      and every state but deleting leads there
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Select, String, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.errors import VersionNotFound, VersionStateChanged
from loraplex.tenants.models import Adapter, AdapterVersion, Tenant
from loraplex.tenants.registry.adapters import AdapterRepository, fresh
from loraplex.tenants.registry.records import SERVING_STATES
from loraplex.tenants.registry.unused_blobs import Blob, lock_digest

TRANSITIONS: Final[Mapping[str, frozenset[str]]] = {
    "uploading": frozenset({"validating", "rejected", "deleting"}),
    "validating": frozenset({"ready", "rejected", "deleting"}),
    "ready": frozenset({"deprecated", "quarantined", "deleting"}),
    "deprecated": frozenset({"ready", "quarantined", "deleting"}),
    "quarantined": frozenset({"ready", "deleting"}),
    "rejected": frozenset({"deleting"}),
    "deleting": frozenset(),
}
ACTIONS: Final[Mapping[tuple[str, str], str]] = {
    ("deprecated", "ready"): "version.restore",
    ("quarantined", "ready"): "version.release",
}
"""The audit log's verb for a move, if the new state alone does not imply it."""
WORDS: Final[Mapping[str, str]] = {
    "validating": "version.create",
    "ready": "version.accept",
    "rejected": "version.reject",
    "deprecated": "version.deprecate",
    "quarantined": "version.quarantine",
    "deleting": "version.delete",
}

FINGERPRINT: Final = "system_fingerprint"
"""The member of a report that names the engine that probed the version; absent without a probe."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of validation: the digest (64 hex digits), the largest rank, and the stored configuration."""

    digest: str
    rank: int
    config: dict[str, Any]


class VersionStates:
    """Moves versions of `tenant_id`'s adapters, in the transaction of `session`; `audit` names the author."""

    def __init__(self, session: AsyncSession, tenant_id: UUID, audit: AuditRepository) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._audit = audit

    async def create(
        self,
        name: str,
        *,
        version_id: UUID,
        size_bytes: int,
        created_by: str | None,
        is_probed: bool = True,
    ) -> AdapterVersion:
        """Add the next version of `name`, in the state `validating`. `is_probed` False is recorded in the audit log.

        Raises `AdapterNotFound`.
        """
        adapter = await AdapterRepository(self._session, self._tenant_id).locked(name)
        newest = select(func.max(AdapterVersion.version)).where(AdapterVersion.adapter_id == adapter.id)
        record = AdapterVersion(
            id=version_id,
            tenant_id=self._tenant_id,
            adapter_id=adapter.id,
            version=(await self._session.scalar(newest) or 0) + 1,
            size_bytes=size_bytes,
            report={"checks": []},
            state="validating",
            created_by=created_by,
        )
        self._session.add(record)
        await self._session.flush()
        after = {"state": record.state, "size_bytes": size_bytes} | ({} if is_probed else {"probed": False})
        await self._audit.record(
            WORDS[record.state], target_of(name, record.version), None, after, tenant_id=self._tenant_id
        )
        return record

    async def move(
        self,
        version_id: UUID,
        to: str,
        *,
        expected: Collection[str] | None = None,
        report: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> AdapterVersion:
        """Move a version to `to`. `expected`: the states it may be in; None for all that lead to `to`. `report` None keeps the
        old one.

        Raises `VersionNotFound`, or `VersionStateChanged` if it is in another state; then nothing changes.
        """
        adapter, record = await self._locked(version_id)
        before = record.state
        allowed = {state for state, targets in TRANSITIONS.items() if to in targets}
        if before not in allowed.intersection(allowed if expected is None else expected):
            raise VersionStateChanged(
                f"version {record.version} of adapter {adapter.name} is {before}, from where it does not become {to}"
            )
        record.state = to
        if report is not None:
            record.report = dict(report)
        await self._session.flush()
        after = {"state": to} | ({} if reason is None else {"reason": reason})
        if to == "ready":
            after["digest"] = record.digest or ""
        action = ACTIONS.get((before, to), WORDS[to])
        target = target_of(adapter.name, record.version)
        await self._audit.record(action, target, {"state": before}, after, tenant_id=self._tenant_id)
        return record

    async def note(self, version_id: UUID, findings: Findings, report: Mapping[str, Any]) -> AdapterVersion:
        """Record the result before the files are stored under the digest, so that garbage collection keeps them.

        The state stays `validating`. Raises `VersionNotFound` or `VersionStateChanged`.
        """
        await lock_digest(self._session, Blob(self._tenant_id, findings.digest))
        adapter, record = await self._locked(version_id)
        if record.state != "validating":
            raise VersionStateChanged(
                f"version {record.version} of adapter {adapter.name} is {record.state}, not validating"
            )
        record.digest, record.rank, record.config = findings.digest, findings.rank, findings.config
        record.report = dict(report)
        await self._session.flush()
        return record

    async def _locked(self, version_id: UUID) -> tuple[Adapter, AdapterVersion]:
        """Take the adapter's lock first, as moves of aliases do, so that transactions never deadlock."""
        of_version = (
            select(Adapter)
            .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
            .where(AdapterVersion.id == version_id, AdapterVersion.tenant_id == self._tenant_id)
            .with_for_update(of=Adapter)
        )
        adapter = (await self._session.scalars(of_version)).one_or_none()
        if adapter is None:
            raise VersionNotFound("no such version")
        query = select(AdapterVersion).where(AdapterVersion.id == version_id).with_for_update()
        return adapter, (await self._session.scalars(fresh(query))).one()


async def owners_of(session: AsyncSession, digest: str) -> Sequence[UUID]:
    """The tenants with a version of these weights that is ready or could be; for an operator's session."""
    query = select(AdapterVersion.tenant_id).distinct()
    serving = query.where(AdapterVersion.digest == digest, AdapterVersion.state.in_(SERVING_STATES))
    return (await session.scalars(serving)).all()


async def names_by_digest(session: AsyncSession, digests: Collection[str]) -> dict[str, str]:
    """Name the versions of these digests, as `tenant/adapter@version`, for an operator's session. Equal files of several
    adapters are named by one.
    """
    if not digests:
        return {}
    name = Tenant.name + "/" + Adapter.name + "@" + cast(AdapterVersion.version, String)
    query = (
        select(AdapterVersion.digest, func.min(name))
        .join(Tenant, Tenant.id == AdapterVersion.tenant_id)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(AdapterVersion.digest.in_(digests))
        .group_by(AdapterVersion.digest)
    )
    return {digest: found for digest, found in await session.execute(query) if digest is not None}


def target_of(name: str, version: int) -> str:
    """The target of a version in the audit log."""
    return f"adapters/{name}/versions/{version}"


MAX_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class PendingVersion:
    """A version in the state `validating`. `digest` None: nothing of it is stored yet."""

    tenant_id: UUID
    version_id: UUID
    digest: str | None = None


class PendingVersions:
    """The versions in the state `validating`, seen by one session of the operator."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, version_id: UUID) -> PendingVersion | None:
        """One version; None if it does not exist or is already validated."""
        found = await self._read(_waiting().where(AdapterVersion.id == version_id))
        return found[0] if found else None

    async def older_than(self, seconds: float) -> list[PendingVersion]:
        """The oldest ones, at most `MAX_AT_ONCE`."""
        bound = func.now() - timedelta(seconds=seconds)
        return await self._read(_waiting().where(AdapterVersion.created_at < bound))

    async def _read(self, query: Select[UUID, UUID, str | None]) -> list[PendingVersion]:
        rows = await self._session.execute(query.order_by(AdapterVersion.created_at).limit(MAX_AT_ONCE))
        return [PendingVersion(*row) for row in rows]


async def serving_by_fingerprint(session: AsyncSession) -> dict[str, int]:
    """How many serving versions, of all tenants, the engines of each fingerprint have probed."""
    probed_by = func.jsonb_extract_path_text(AdapterVersion.report, FINGERPRINT).label("probed_by")
    serving = AdapterVersion.state.in_(SERVING_STATES)
    rows = await session.execute(select(probed_by, func.count()).where(serving).group_by("probed_by"))
    return {name: count for name, count in rows if name is not None}


def _waiting() -> Select[UUID, UUID, str | None]:
    columns = (AdapterVersion.tenant_id, AdapterVersion.id, AdapterVersion.digest)
    return select(*columns).where(AdapterVersion.state == "validating")
