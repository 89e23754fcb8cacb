"""Use cases on versions: change the profile, deprecate, restore, delete, lift a quarantine.

Invariant: a deprecation needs a version without an alias. A deletion needs one that nothing uses; its number is never used
again.
"""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from loraplex.tenants import running_requests
from loraplex.tenants.administration.adapters import require_idle
from loraplex.tenants.admission import fences
from loraplex.tenants.errors import InUse
from loraplex.tenants.models import Adapter, AdapterVersion
from loraplex.tenants.registry.adapters import AdapterRepository, require_revision
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import ProfileChange, VersionDocument
from loraplex.tenants.registry.unused_blobs import DELETING
from loraplex.tenants.registry.versions import VersionStates, target_of
from loraplex.tenants.unit_of_work import UnitOfWork


async def change_profile(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    version: int,
    change: ProfileChange,
    *,
    seen: int | None = None,
) -> VersionDocument:
    """Change the styles or the defaults. `seen`: the revision that the author has read, None for any.

    Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, and `ProfileFixed` after the version's first alias.
    """
    before = _profile((await _locked(uow, tenant_id, name, version))[1])
    record = await AdapterRepository(uow.session, tenant_id).change_profile(name, version, change, seen)
    target = target_of(name, version)
    await uow.audit.record("version.change", target, before, _profile(record), tenant_id=tenant_id)
    return VersionDocument.of(name, record)


async def deprecate(
    uow: UnitOfWork, tenant_id: UUID, name: str, version: int, *, seen: int | None = None
) -> VersionDocument:
    """Take a ready version out of service: no alias may point to it, and `name@version` is refused from now on. Requests that
    run on it end on it. `seen` as in `change_profile`.

    Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, `VersionStateChanged` for a version that is not ready, and
    `InUse` while an alias points to it.
    """
    adapter, record = await _locked(uow, tenant_id, name, version)
    require_revision(record, seen)
    await _require_unaliased(uow, adapter, version)
    return await _moved(uow, name, record, "ready", "deprecated")


async def restore(
    uow: UnitOfWork, tenant_id: UUID, name: str, version: int, *, seen: int | None = None
) -> VersionDocument:
    """Make a deprecated version ready again. `seen` as in `change_profile`.

    Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, and `VersionStateChanged` for a version that is not deprecated.
    """
    _, record = await _locked(uow, tenant_id, name, version)
    require_revision(record, seen)
    return await _moved(uow, name, record, "deprecated", "ready")


async def delete(
    uow: UnitOfWork, tenant_id: UUID, name: str, version: int, *, seen: int | None = None
) -> UUID:
    """Delete a version; repeating it changes nothing. A gateway removes the files later. Return the adapter's id. `seen` as in
    `change_profile`.

    Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, and `InUse` while an alias points to it, it is being
    validated, or requests run on it. Requests are known once every gateway has shipped its journal: `QuotaUnavailable`
    until then.
    """
    await fences.ship_everywhere(uow.database, tenant_id)
    state, record = await _deleted(uow, tenant_id, name, version, seen)
    if state != record.state:
        before, after = {"state": state, "digest": record.digest}, {"state": record.state}
        target = target_of(name, version)
        await uow.audit.record("version.delete", target, before, after, tenant_id=tenant_id)
    return record.adapter_id


async def force_delete(
    uow: UnitOfWork, tenant_id: UUID, name: str, version: int, *, end_running: bool = True
) -> UUID:
    """Delete a version as an operator, even while requests run on it. Return the adapter's id. `end_running` as in
    `adapters.force_delete`.

    Raises `AdapterNotFound`, `VersionNotFound`, and `InUse` while an alias points to it or it is being validated.
    """
    _, record = await _deleted(uow, tenant_id, name, version, forced=True)
    after = {"state": record.state, "forced": True, "end_running": end_running}
    before = {"digest": record.digest}
    await uow.audit.record("version.delete", target_of(name, version), before, after, tenant_id=tenant_id)
    if end_running:
        await running_requests.end(uow.session, tenant_id, adapter_id=record.adapter_id, version=version)
    return record.adapter_id


async def lift_quarantine(uow: UnitOfWork, tenant_id: UUID, name: str, version: int) -> VersionDocument:
    """Make a quarantined version ready again, as an operator.

    Raises `AdapterNotFound`, `VersionNotFound`, and `VersionStateChanged` for a version that is not quarantined.
    """
    record = await AdapterRepository(uow.session, tenant_id).version(name, version)
    return await _moved(uow, name, record, "quarantined", "ready")


async def _deleted(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    version: int,
    seen: int | None = None,
    *,
    forced: bool = False,
) -> tuple[str, AdapterVersion]:
    """Delete a version; return the state that it had, under the lock: of two deletions at once only one changes it."""
    adapter, record = await _locked(uow, tenant_id, name, version)
    require_revision(record, seen)
    before = record.state
    if before != DELETING:
        await _require_unaliased(uow, adapter, version)
        await require_idle(uow.session, adapter, [record], forced=forced)
        record.state = DELETING
        record.blob_deleted_at = datetime.now(UTC) if record.digest is None else None
        await uow.session.flush()
    return before, record


async def _require_unaliased(uow: UnitOfWork, adapter: Adapter, version: int) -> None:
    if names := await AliasRepository(uow.session, adapter.tenant_id).pointing_to(adapter, version):
        raise InUse(f"these aliases point to version {version}: {', '.join(names)}; move them first")


async def _locked(
    uow: UnitOfWork, tenant_id: UUID, name: str, version: int
) -> tuple[Adapter, AdapterVersion]:
    """Return a version and its adapter, which is locked until the transaction ends."""
    adapters = AdapterRepository(uow.session, tenant_id)
    adapter = await adapters.locked(name)
    return adapter, await adapters.version_of(adapter, version)


async def _moved(uow: UnitOfWork, name: str, record: AdapterVersion, before: str, to: str) -> VersionDocument:
    states = VersionStates(uow.session, record.tenant_id, uow.audit)
    return VersionDocument.of(name, await states.move(record.id, to, expected=(before,)))


def _profile(record: AdapterVersion) -> dict[str, Any]:
    styles = {"tool_style": record.tool_style, "reasoning_style": record.reasoning_style}
    return {**styles, "defaults": dict(record.defaults), "decision": record.decision}
