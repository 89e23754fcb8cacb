"""Use cases on uploads in parts: open one, abort it. `Uploads` completes it, or takes a whole adapter at once."""

from collections.abc import Sequence
from uuid import UUID

from loraplex.adapters.uploads.service import Uploads
from loraplex.tenants.models import Upload
from loraplex.tenants.registry.records import UploadDocument
from loraplex.tenants.registry.uploads import DeclaredFile, UploadRepository
from loraplex.tenants.unit_of_work import UnitOfWork


async def open_upload(
    uow: UnitOfWork, uploads: Uploads, tenant_id: UUID, name: str, files: Sequence[DeclaredFile]
) -> UploadDocument:
    """Open an upload of these files and reserve their bytes.

    Raises `AdapterNotFound`, `CountReached`, `UploadTooLarge`, `StorageFull`.
    """
    uploads.require_possible(files)
    await uploads.require_space()
    repository = UploadRepository(uow.session, tenant_id)
    upload = await repository.open(name, files, uploads.terms, uow.actor.name)
    after = {"files": upload.files, "expires_at": upload.expires_at.isoformat()}
    await uow.audit.record("upload.open", _target(name, upload), None, after, tenant_id=tenant_id)
    return UploadDocument.of(upload, name)


async def abort_upload(uow: UnitOfWork, tenant_id: UUID, upload_id: UUID) -> None:
    """Abort an upload; repeating it changes nothing. Delete its parts with `Uploads.discard` after the commit.

    Raises `UploadNotFound`, `UploadEnded`, `UploadClaimed`.
    """
    repository = UploadRepository(uow.session, tenant_id)
    before = (await repository.locked(upload_id)).state
    upload = await repository.abort(upload_id)
    if upload.state != before:
        target = _target(await repository.adapter_name(upload), upload)
        states = {"state": before}, {"state": upload.state}
        await uow.audit.record("upload.abort", target, *states, tenant_id=tenant_id)


def _target(name: str, upload: Upload) -> str:
    return f"adapters/{name}/uploads/{upload.id}"
