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
from loraplex.tenants.audit_queries import audit_entries, last_authors
from loraplex.tenants.audit_records import OperatorAuditDocument
from loraplex.tenants.evaluations.queries import gates
from loraplex.tenants.evaluations.records import GateDocument
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.ledger.recent_requests import VersionUse, alias_uses, hourly_requests, version_uses
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import SERVING_STATES, AdapterDocument, AliasDocument, VersionDocument
from loraplex.tenants.registry.use_cases import target
from loraplex.tenants.registry.versions import target_of

PAGE: Final = 50
MAX_FILE_BYTES: Final = max_file_bytes(DEFAULT_LIMITS)
"""The largest size in bytes of each file of an adapter, by its name."""
DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A version that an alias leads to, with its weight in percent, and what it answered by the alias; None where nothing is known.

    `observed_permille`: its share of the requests that the alias's targets answered.
    """

    version: int
    weight: int
    use: VersionUse | None
    observed_permille: int | None


@dataclass(frozen=True, slots=True)
class AliasUse:
    """An alias, and its targets with what they answered by it; of a split the requests since `since`, of one version none."""

    record: AliasDocument
    targets: Sequence[Target]
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedVersion:
    """A version, the aliases that lead to it, and its use. `tier` is None unless its files are stored and known.

    `load_ms`: by how much its next request waits longer because it is not on the device; None where that is not known.
    """

    record: VersionDocument
    aliases: Sequence[str]
    use: VersionUse | None
    tier: Tier | None
    load_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDetail:
    """`versions`: newest first. `older`: the version that the next page follows, None on the last one. `is_sample`: the use of
    versions counts the tenant's newest requests only. `gates` and `reverts` are by alias; a revert is the entry of the audit log,
    where a guard has brought the alias to where it is.
    """

    record: AdapterDocument
    aliases: Sequence[AliasUse]
    gates: Mapping[str, GateDocument]
    reverts: Mapping[str, OperatorAuditDocument]
    versions: Sequence[ListedVersion]
    older: int | None
    requests_24h: int
    is_sample: bool
    is_residency_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDetail:
    """A version with its report. `quarantined_at` and `quarantine_reason` are those of the audit log; None unless the version is
    quarantined now.
    """

    record: VersionDocument
    report: Report
    quarantined_at: datetime | None
    quarantine_reason: str | None


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of two configurations as indented JSON: in both, only in the older, or only in the newer one."""

    kind: Literal["same", "removed", "added"]
    text: str


async def adapter(
    session: AsyncSession,
    tenant_id: UUID,
    name: str,
    residency: Residency | None = None,
    before: int | None = None,
) -> AdapterDetail:
    """Return an adapter with all its aliases and at most 50 versions older than `before`. Raises `AdapterNotFound`."""
    repository = AdapterRepository(session, tenant_id)
    row = await repository.get(name)
    aliases = await AliasRepository(session, tenant_id).page_of(row, None, None)
    found = await repository.version_page(name, before, PAGE + 1)
    shown = [VersionDocument.of(name, each) for each in found[:PAGE]]
    now = datetime.now(UTC)
    uses = await version_uses(session, tenant_id, row.id, now - DAY)
    since = {each.alias: max(each.updated_at, now - DAY) for each in aliases}
    split = {each.alias: since[each.alias] for each in aliases if each.version is None}
    by_alias = await alias_uses(session, tenant_id, row.id, split)
    reverts = await last_authors(session, tenant_id, "alias.revert", [target(each) for each in aliases])
    counts = await hourly_requests(session, tenant_id, "adapter", [row.id], hours_until(now)[0])
    return AdapterDetail(
        record=AdapterDocument.model_validate(row),
        aliases=[
            _alias(each, by_alias[each.alias].by_version if each.alias in by_alias else {}, since[each.alias])
            for each in _production_first(aliases)
        ],
        gates=await gates(session, tenant_id, name),
        reverts={
            each.alias: entry
            for each in aliases
            if (entry := reverts.get(target(each))) and entry.id >= uuid7_from(each.updated_at)
        },
        versions=[_version(each, aliases, uses.by_version, residency) for each in shown],
        older=shown[-1].version if len(found) > PAGE else None,
        requests_24h=sum(counts[row.id].values()),
        is_sample=uses.is_partial or any(each.is_partial for each in by_alias.values()),
        is_residency_known=residency is not None and residency.is_known,
    )


async def version(session: AsyncSession, tenant_id: UUID, name: str, number: int) -> VersionDetail:
    """Return one version with its report. Raises `AdapterNotFound`, `VersionNotFound`."""
    record = await queries.version(session, tenant_id, name, number)
    entry = None
    if record.state == "quarantined":
        filters = {"target": target_of(name, number), "action": "version.quarantine"}
        entry = next(iter(await audit_entries(session, tenant_id, filters, None, limit=1)), None)
    return VersionDetail(
        record=record,
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


def _production_first(aliases: Sequence[AliasDocument]) -> list[AliasDocument]:
    return sorted(aliases, key=lambda each: (each.alias != "production", each.alias))


def _alias(record: AliasDocument, uses: Mapping[int, VersionUse], since: datetime) -> AliasUse:
    answered = sum(uses[version].requests for version in record.targets if version in uses)
    return AliasUse(
        record,
        [
            Target(
                version=share.version,
                weight=share.weight,
                use=uses.get(share.version),
                observed_permille=_permille(uses.get(share.version), answered),
            )
            for share in record.split
        ],
        since,
    )


def _permille(use: VersionUse | None, answered: int) -> int | None:
    """Rounded half up."""
    return (
        None if not answered else (2000 * (0 if use is None else use.requests) + answered) // (2 * answered)
    )


def _version(
    record: VersionDocument,
    aliases: Sequence[AliasDocument],
    uses: Mapping[int, VersionUse],
    residency: Residency | None,
) -> ListedVersion:
    tier: Tier | None = None
    load_ms: float | None = None
    if residency is not None and record.digest is not None and record.state in SERVING_STATES:
        tier = residency.tier([record.digest])
        load_ms = None if tier is None else residency.load_ms(tier, record.size_bytes)
    return ListedVersion(
        record=record,
        aliases=[_share(alias, record.version) for alias in aliases if record.version in alias.targets],
        use=uses.get(record.version),
        tier=tier,
        load_ms=load_ms,
    )


def _share(alias: AliasDocument, version: int) -> str:
    return alias.alias if alias.version is not None else f"{alias.alias} {alias.targets[version]} %"
