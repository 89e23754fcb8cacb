"""Receives the bodies of uploads: a whole adapter as multipart, or one part.

Invariant: bodies are streamed to disk, counted and hashed; a request that fails leaves no files behind.
"""

from functools import partial
from pathlib import Path
from uuid import UUID, uuid4, uuid5

from starlette.requests import Request

from loraplex.adapters.uploads.service import Uploads
from loraplex.platform.tenant_limiter import TenantLimiter
from loraplex.platform.web.adapters.multipart_upload import FRAME_BYTES, receive_folder
from loraplex.platform.web.adapters.upload_documents import content_digest
from loraplex.platform.web.planes import TenantRequest, idempotency_key
from loraplex.platform.web.transport.body_stream import BodyChunks, declared_size
from loraplex.tenants.registry.records import AcceptedVersion, PartDocument
from loraplex.tenants.registry.uploads import DeclaredFile


class UploadReceiver:
    """The receiver of one gateway, as `app.state.upload_receiver`. `uploads`: their transactions wait for the tenant's slots."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        limits = uploads.limits
        self._limiter = TenantLimiter(
            "uploads", total=limits.max_in_flight, per_tenant=limits.max_in_flight_per_tenant
        )

    async def folder(self, request: TenantRequest, name: str) -> AcceptedVersion:
        """Receive a whole adapter. The same Idempotency-Key with the same files gives the same version."""
        key = idempotency_key(request.http)
        async with self._limiter.slot(request.tenant_id):
            return await self.uploads.submit(
                request.tenant_id,
                name,
                partial(self._receive_folder, request.http),
                size_bytes=_declared_bytes(request.http, self.uploads.max_bytes),
                actor=request.actor,
                upload_id=uuid4() if key is None else uuid5(request.caller.api_key_id, key),
            )

    async def part(self, request: TenantRequest, upload_id: UUID, file: str, number: int) -> PartDocument:
        """Receive one part of an open upload. Raises as `Uploads.receive_part`, `InvalidParameter`."""
        uploads, digest = self.uploads, content_digest(request.http)
        async with self._limiter.slot(request.tenant_id):
            size = await uploads.expected_size(request.tenant_id, upload_id, file, number)
            chunks = BodyChunks(request.http, size, uploads.limits)
            stored = await uploads.receive_part(
                request.tenant_id, upload_id, file, number, chunks, size=size, sha256=digest
            )
        return PartDocument(file=file, number=number, size=stored.size, sha256=stored.sha256)

    async def _receive_folder(self, request: Request, staged: Path) -> list[DeclaredFile]:
        uploads = self.uploads
        chunks = BodyChunks(request, uploads.max_bytes + FRAME_BYTES, uploads.limits)
        content_type = request.headers.get("content-type", "")
        floor_bytes = uploads.limits.storage_floor_bytes
        files = await receive_folder(chunks, content_type, staged, uploads.adapter_limits, floor_bytes)
        return [DeclaredFile(name, files[name].size, files[name].sha256) for name in sorted(files)]


def _declared_bytes(request: Request, max_bytes: int) -> int:
    """Return the size of the files by the Content-Length, less what may be frame; `max_bytes` without that header."""
    declared = declared_size(request)
    return max_bytes if declared is None else max(0, min(declared - FRAME_BYTES, max_bytes))
