"""Use cases on adapters: create, describe, delete.

Invariant: a deletion needs an adapter that nothing uses. An operator may force it; the audit log then names the aliases.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import case, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants import running_requests
from loraplex.tenants.admission import fences
from loraplex.tenants.errors import InUse
from loraplex.tenants.models import Adapter, AdapterVersion, ReservationRow
from loraplex.tenants.registry.adapters import AdapterRepository, present, require_revision
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import AdapterDocument
from loraplex.tenants.registry.unused_blobs import DELETING
from loraplex.tenants.unit_of_work import UnitOfWork

UNVALIDATED: Final = ("uploading", "validating")
WITHOUT_FILES: Final = func.coalesce(
    AdapterVersion.blob_deleted_at, case((AdapterVersion.digest.is_(None), func.now()))
)
"""When a deleted version's files were removed: one without a digest has none."""


async def create(
    uow: UnitOfWork, tenant_id: UUID, name: str, description: str = "", *, base_model: str | None
) -> AdapterDocument:
    """Create an adapter without versions. `base_model`: the name under which the base model is served, if it is known.

    Raises `InvalidName`, `NameTaken`, `CountReached`.
    """
    adapter = await AdapterRepository(uow.session, tenant_id).create(name, description, base_model)
    after = {"name": name, "description": description}
    await uow.audit.record("adapter.create", target(name), None, after, tenant_id=tenant_id)
    return AdapterDocument.model_validate(adapter)


async def describe(
    uow: UnitOfWork, tenant_id: UUID, name: str, description: str, *, seen: int | None = None
) -> AdapterDocument:
    """Change the description. `seen`: the revision that the author has read, None for any.

    Raises `AdapterNotFound`, `RevisionMoved`.
    """
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    require_revision(adapter, seen)
    before, after = {"description": adapter.description}, {"description": description}
    adapter.description = description
    await uow.session.flush()
    await uow.audit.record("adapter.change", target(name), before, after, tenant_id=tenant_id)
    return AdapterDocument.model_validate(adapter)


async def delete(uow: UnitOfWork, tenant_id: UUID, name: str, *, seen: int | None = None) -> UUID:
    """Delete an adapter and all its versions: its name is free, and a gateway removes the files later. Return the adapter's id.
    `seen` as in `describe`.

    Raises `AdapterNotFound`, `RevisionMoved`, and `InUse` while it has an alias, a version is being validated, or requests
    run on one. Requests are known once every gateway has shipped its journal: `QuotaUnavailable` until then.
    """
    await fences.ship_everywhere(uow.database, tenant_id)
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    require_revision(adapter, seen)
    if aliases := await AliasRepository(uow.session, tenant_id).list(name):
        names = ", ".join(each.alias for each in aliases)
        raise InUse(f"adapter {name} has these aliases: {names}; delete them first")
    await require_idle(uow.session, adapter, (await uow.session.scalars(present(adapter))).all())
    await _remove(uow, adapter)
    before = {"description": adapter.description}
    await uow.audit.record("adapter.delete", target(name), before, tenant_id=tenant_id)
    return adapter.id


async def force_delete(uow: UnitOfWork, tenant_id: UUID, name: str, *, end_running: bool = True) -> UUID:
    """Delete an adapter as an operator, with its aliases and even while requests run on it. Return the adapter's id.
    `end_running`: these requests end, on every gateway; else they run on to their end. Raises `AdapterNotFound`.
    """
    aliases = await AliasRepository(uow.session, tenant_id).list(name)
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    await _remove(uow, adapter)
    before = {"description": adapter.description, "aliases": {each.alias: each.targets for each in aliases}}
    after = {"forced": True, "end_running": end_running}
    await uow.audit.record("adapter.delete", target(name), before, after, tenant_id=tenant_id)
    if end_running:
        await running_requests.end(uow.session, tenant_id, adapter_id=adapter.id)
    return adapter.id


async def _remove(uow: UnitOfWork, adapter: Adapter) -> None:
    """A deleted version stays as a row, for the ledger, and its number is never used again."""
    adapter.deleted_at = datetime.now(UTC)
    await uow.session.flush()
    own = (AdapterVersion.tenant_id == adapter.tenant_id, AdapterVersion.adapter_id == adapter.id)
    await uow.session.execute(
        update(AdapterVersion).where(*own).values(state=DELETING, blob_deleted_at=WITHOUT_FILES)
    )


async def require_idle(
    session: AsyncSession, adapter: Adapter, versions: Sequence[AdapterVersion], *, forced: bool = False
) -> None:
    """Raise `InUse` while one of the versions is being validated or, unless `forced`, requests run on their weights."""
    for version in versions:
        if version.state in UNVALIDATED:
            raise InUse(f"version {version.version} of adapter {adapter.name} is being validated; try later")
    if forced:
        return
    running = select(func.count()).where(
        ReservationRow.tenant_id == adapter.tenant_id,
        ReservationRow.adapter_id == adapter.id,
        ReservationRow.digest.in_({version.digest for version in versions if version.digest is not None}),
    )
    if count := await session.scalar(running):
        raise InUse(f"{count} requests run on adapter {adapter.name} with these weights; try later")


def target(name: str) -> str:
    """Return the adapter's path in the audit log."""
    return f"adapters/{name}"
