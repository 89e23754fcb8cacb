"""Reads the adapters of one tenant with their versions, aliases and uploads."""

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import CalibrationNotFound
from loraplex.tenants.models import AdapterVersion, DecisionCalibration
from loraplex.tenants.pages import Slice
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import (
    AdapterDocument,
    AliasDocument,
    CalibrationDocument,
    OpenUpload,
    UploadDocument,
    VersionDocument,
    decision_read,
)
from loraplex.tenants.registry.uploads import UploadRepository


async def adapters(session: AsyncSession, tenant_id: UUID, part: Slice[str]) -> list[AdapterDocument]:
    """Return adapters by name."""
    found = await AdapterRepository(session, tenant_id).page(part.after, part.fetch)
    return [AdapterDocument.model_validate(row) for row in found]


async def names(session: AsyncSession, tenant_id: UUID) -> list[str]:
    """Return the names of all adapters, sorted."""
    return [row.name for row in await AdapterRepository(session, tenant_id).list()]


async def adapter(session: AsyncSession, tenant_id: UUID, name: str) -> AdapterDocument:
    """Return one adapter. Raises `AdapterNotFound`."""
    return AdapterDocument.model_validate(await AdapterRepository(session, tenant_id).get(name))


async def versions(
    session: AsyncSession, tenant_id: UUID, name: str, part: Slice[int]
) -> list[VersionDocument]:
    """Return versions of an adapter, newest first. Raises `AdapterNotFound`."""
    found = await AdapterRepository(session, tenant_id).version_page(name, part.after, part.fetch)
    return [VersionDocument.of(name, row) for row in found]


async def version(session: AsyncSession, tenant_id: UUID, name: str, number: int) -> VersionDocument:
    """Return one version. Raises `AdapterNotFound`, `VersionNotFound`."""
    return VersionDocument.of(name, await AdapterRepository(session, tenant_id).version(name, number))


async def aliases(session: AsyncSession, tenant_id: UUID, name: str, part: Slice[str]) -> list[AliasDocument]:
    """Return aliases of an adapter by name. Raises `AdapterNotFound`."""
    return [*await AliasRepository(session, tenant_id).page(name, part.after, part.fetch)]


async def alias(session: AsyncSession, tenant_id: UUID, name: str, alias: str) -> AliasDocument:
    """Return one alias. Raises `AdapterNotFound`, `AliasNotFound`."""
    return await AliasRepository(session, tenant_id).get(name, alias)


async def upload(session: AsyncSession, tenant_id: UUID, upload_id: UUID) -> UploadDocument:
    """Return an upload with its stored parts. Raises `UploadNotFound`."""
    repository = UploadRepository(session, tenant_id)
    found = await repository.get(upload_id)
    return UploadDocument.of(found, await repository.adapter_name(found), await repository.parts(upload_id))


async def open_uploads(session: AsyncSession, tenant_id: UUID, name: str) -> list[OpenUpload]:
    """Return the adapter's uploads that wait for parts, newest first. Raises `AdapterNotFound`."""
    repository = UploadRepository(session, tenant_id)
    found = await repository.open_of((await AdapterRepository(session, tenant_id).get(name)).id)
    received = await repository.received([row.id for row in found])
    return [
        OpenUpload(
            id=row.id,
            created_by=row.created_by,
            expires_at=row.expires_at,
            files=[(file["name"], file["size"], file["sha256"]) for file in row.files],
            size_bytes=row.size_bytes,
            received_bytes=received.get(row.id, 0),
        )
        for row in found
    ]


async def calibration(
    session: AsyncSession, tenant_id: UUID, name: str, version: int, system_fingerprint: str, wording: str
) -> CalibrationDocument:
    """Return the calibration of a version's decisions under a base model and a format.

    Raises `AdapterNotFound`, `VersionNotFound`, `CalibrationNotFound`.
    """
    record = await AdapterRepository(session, tenant_id).version(name, version)
    found = await calibration_of(session, tenant_id, record, system_fingerprint, wording)
    if found is None:
        raise CalibrationNotFound(f"{name}@{version} has no calibration under the base model that is served")
    return found


async def calibration_of(
    session: AsyncSession,
    tenant_id: UUID,
    record: AdapterVersion | VersionDocument,
    system_fingerprint: str,
    wording: str,
) -> CalibrationDocument | None:
    """Return the calibration of a version that was read; None where it has none under a base model and a format."""
    key = (tenant_id, record.digest, system_fingerprint, wording, decision_read(record.decision))
    found = None if record.digest is None else await session.get(DecisionCalibration, key)
    return None if found is None else CalibrationDocument.model_validate(found)
