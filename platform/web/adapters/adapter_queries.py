"""One adapter of a tenant: aliases with their observed shares, versions, a version's report, and two configurations compared."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.storage.local_store import max_file_bytes
from loraplex.platform.web.adapters.residency import Residency, Tier
from loraplex.platform.web.adapters.validation_report import Report, report_of
from loraplex.platform.web.keys.queries import hours_until
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.ledger.recent_requests import VersionUse, hourly_requests, version_uses
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.adapters import SERVING_STATES, AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository, AliasState
from loraplex.tenants.registry.uploads import UploadRepository
from loraplex.tenants.registry.versions import target_of

PAGE: Final = 50
MAX_FILE_BYTES: Final = max_file_bytes(DEFAULT_LIMITS)
"""The largest size in bytes of each file of an adapter, by its name."""
DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A version that an alias leads to, with its weight in percent, and what it answered lately; None where it is not known.

    `observed_permille`: its share of the requests that the alias's targets answered.
    """

    version: int
    weight: int
    use: VersionUse | None
    observed_permille: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """`generation` is its revision. `previous`: version -> weight of a rollback, None where there is nothing to go back to."""

    alias: str
    generation: int
    targets: Sequence[Target]
    previous: Mapping[int, int] | None
    updated_at: datetime

    @property
    def weights(self) -> dict[int, int]:
        """The weights of its versions in percent."""
        return {target.version: target.weight for target in self.targets}


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """`digest` and `rank` are None until the files were validated; `tier` is None unless its files are stored and known.

    `load_ms`: by how much its next request waits longer because it is not on the device; None where that is not known.
    """

    version: int
    state: str
    aliases: Sequence[str]
    digest: str | None
    rank: int | None
    size_bytes: int
    tool_style: str | None
    created_at: datetime
    created_by: str | None
    revision: int
    use: VersionUse | None
    tier: Tier | None
    load_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDetail:
    """`versions`: newest first. `older`: the version that the next page follows, None on the last one. `is_sample`: the use of
    versions counts the tenant's newest requests only.
    """

    id: UUID
    name: str
    description: str
    revision: int
    created_at: datetime
    aliases: Sequence[Alias]
    versions: Sequence[Version]
    older: int | None
    requests_24h: int
    is_sample: bool
    is_residency_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDetail:
    """One version with its report. `config` is None until the files were validated.

    `quarantined_at` and `quarantine_reason` are those of the audit log; None unless the version is quarantined now.
    """

    name: str
    version: int
    state: str
    digest: str | None
    revision: int
    created_by: str | None
    created_at: datetime
    config: Mapping[str, Any] | None
    report: Report
    quarantined_at: datetime | None
    quarantine_reason: str | None


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of two configurations as indented JSON: in both, only in the older, or only in the newer one."""

    kind: Literal["same", "removed", "added"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """An upload that waits for parts. `files`: name, size in bytes, SHA-256 in hexadecimal digits. `received` in bytes."""

    id: UUID
    created_by: str | None
    expires_at: datetime
    files: Sequence[tuple[str, int, str]]
    size_bytes: int
    received_bytes: int


async def adapter(
    session: AsyncSession,
    tenant_id: UUID,
    name: str,
    residency: Residency | None = None,
    before: int | None = None,
) -> AdapterDetail:
    """Return an adapter with all its aliases and at most 50 versions older than `before`. Raises `AdapterNotFound`."""
    repository = AdapterRepository(session, tenant_id)
    record = await repository.get(name)
    states = await AliasRepository(session, tenant_id).page_of(record, None, None)
    found = await repository.version_page(name, before, PAGE + 1)
    shown = found[:PAGE]
    now = datetime.now(UTC)
    uses = await version_uses(session, tenant_id, record.id, now - DAY)
    counts = await hourly_requests(session, tenant_id, "adapter", [record.id], hours_until(now)[0])
    return AdapterDetail(
        id=record.id,
        name=record.name,
        description=record.description,
        revision=record.revision,
        created_at=record.created_at,
        aliases=[_alias(state, uses.by_version) for state in _production_first(states)],
        versions=[_version(each, states, uses.by_version, residency) for each in shown],
        older=shown[-1].version if len(found) > PAGE else None,
        requests_24h=sum(counts[record.id].values()),
        is_sample=uses.is_partial,
        is_residency_known=residency is not None and residency.is_known,
    )


async def version(session: AsyncSession, tenant_id: UUID, name: str, number: int) -> VersionDetail:
    """Return one version with its report. Raises `AdapterNotFound`, `VersionNotFound`."""
    repository = AdapterRepository(session, tenant_id)
    record = await repository.version(name, number)
    entry = None
    if record.state == "quarantined":
        filters = {"target": target_of(name, number), "action": "version.quarantine"}
        entry = next(iter(await audit_entries(session, tenant_id, filters, None, limit=1)), None)
    return VersionDetail(
        name=name,
        version=record.version,
        state=record.state,
        digest=record.digest,
        revision=record.revision,
        created_by=record.created_by,
        created_at=record.created_at,
        config=record.config,
        report=report_of(record.report, record.state),
        quarantined_at=None if entry is None else entry.at,
        quarantine_reason=None if entry is None else (entry.after or {}).get("reason"),
    )


async def version_before(session: AsyncSession, tenant_id: UUID, name: str, number: int) -> int | None:
    """Return the newest older version that has a configuration; None if there is none. Raises `AdapterNotFound`."""
    older = await AdapterRepository(session, tenant_id).version_page(name, number, PAGE)
    return next((each.version for each in older if each.config is not None), None)


async def alias_author(session: AsyncSession, tenant_id: UUID, name: str, alias: str) -> str | None:
    """Return who moved an alias last, as the audit log says; None where it does not say."""
    found = await audit_entries(
        session, tenant_id, {"target": f"adapters/{name}/aliases/{alias}"}, None, limit=1
    )
    return found[0].actor if found else None


async def names(session: AsyncSession, tenant_id: UUID) -> list[str]:
    """Return the names of the tenant's adapters, sorted."""
    return [record.name for record in await AdapterRepository(session, tenant_id).list()]


async def open_uploads(session: AsyncSession, tenant_id: UUID, name: str) -> list[OpenUpload]:
    """Return the adapter's uploads that wait for parts, newest first. Raises `AdapterNotFound`."""
    record = await AdapterRepository(session, tenant_id).get(name)
    repository = UploadRepository(session, tenant_id)
    uploads = await repository.open_of(record.id)
    received = await repository.received([upload.id for upload in uploads])
    return [
        OpenUpload(
            id=upload.id,
            created_by=upload.created_by,
            expires_at=upload.expires_at,
            files=[(file["name"], file["size"], file["sha256"]) for file in upload.files],
            size_bytes=upload.size_bytes,
            received_bytes=received.get(upload.id, 0),
        )
        for upload in uploads
    ]


def config_diff(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[DiffLine]:
    """Compare two configurations line by line, as JSON with sorted keys; empty if they are equal. None: there is none."""
    old, new = _lines(before), _lines(after)
    if old == new:
        return []
    kinds: dict[str, Literal["same", "removed", "added"]] = {" ": "same", "-": "removed", "+": "added"}
    return [
        DiffLine(kinds[line[0]], line[2:]) for line in difflib.ndiff(old, new) if not line.startswith("?")
    ]


def _lines(config: Mapping[str, Any] | None) -> list[str]:
    """A list of names stays on one line, so that a changed list is one changed line."""
    if config is None:
        return []
    inner = [f"  {json.dumps(key)}: {json.dumps(config[key])}," for key in sorted(config)]
    return ["{", *inner[:-1], *(line.removesuffix(",") for line in inner[-1:]), "}"]


def _production_first(states: Sequence[AliasState]) -> list[AliasState]:
    return sorted(states, key=lambda state: (state.alias != "production", state.alias))


def _alias(state: AliasState, uses: Mapping[int, VersionUse]) -> Alias:
    answered = sum(uses[version].requests for version in state.targets if version in uses)
    return Alias(
        alias=state.alias,
        generation=state.generation,
        targets=[
            Target(
                version=version,
                weight=state.targets[version],
                use=uses.get(version),
                observed_permille=_permille(uses.get(version), answered),
            )
            for version in sorted(state.targets)
        ],
        previous=state.previous,
        updated_at=state.updated_at,
    )


def _permille(use: VersionUse | None, answered: int) -> int | None:
    """Rounded half up."""
    return (
        None if not answered else (2000 * (0 if use is None else use.requests) + answered) // (2 * answered)
    )


def _version(
    record: AdapterVersion,
    states: Sequence[AliasState],
    uses: Mapping[int, VersionUse],
    residency: Residency | None,
) -> Version:
    tier: Tier | None = None
    load_ms: float | None = None
    if residency is not None and record.digest is not None and record.state in SERVING_STATES:
        tier = residency.tier([record.digest])
        load_ms = None if tier is None else residency.load_ms(tier, record.size_bytes)
    return Version(
        version=record.version,
        state=record.state,
        aliases=[_share(state, record.version) for state in states if record.version in state.targets],
        digest=record.digest,
        rank=record.rank,
        size_bytes=record.size_bytes,
        tool_style=record.tool_style,
        created_at=record.created_at,
        created_by=record.created_by,
        revision=record.revision,
        use=uses.get(record.version),
        tier=tier,
        load_ms=load_ms,
    )


def _share(state: AliasState, version: int) -> str:
    return state.alias if len(state.targets) == 1 else f"{state.alias} {state.targets[version]} %"
