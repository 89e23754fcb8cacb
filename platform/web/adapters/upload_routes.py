"""Routes of uploads: a whole adapter in one multipart request, or parts that may be repeated, in any order and in parallel.

Invariant: bodies are streamed to disk, counted and hashed; a request that fails leaves no files behind.
"""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import UUID, uuid4, uuid5

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.adapters.uploads.service import Uploads
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.services import uploads as use_cases
from loraplex.platform.tenant_limiter import TenantLimiter
from loraplex.platform.web.adapters.multipart_upload import FRAME_BYTES, receive_folder
from loraplex.platform.web.adapters.upload_documents import (
    AcceptedVersion,
    PartDocument,
    UploadBody,
    UploadDocument,
    accepted_version,
    binary_body,
    content_digest,
    folder_body,
    idempotency_key,
    part_response,
    upload_response,
)
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.openapi import described
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented, respond
from loraplex.platform.web.transport.body_stream import BodyChunks, declared_size
from loraplex.tenants.actors import Actor, key_actor
from loraplex.tenants.errors import UploadNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.registry.uploads import DeclaredFile, UploadRepository
from loraplex.tenants.unit_of_work import UnitOfWork

WRITE: Final = "adapters:write"
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")


def uploads_router(endpoint: ManagementEndpoint, authenticator: Authenticator, uploads: Uploads) -> APIRouter:
    """Build the routes of uploads in parts and of whole adapters."""
    router = APIRouter()
    writer = Depends(authenticator.requires(WRITE))
    uploads = uploads.in_turns(endpoint.transaction_slot)
    _add_session_routes(router, endpoint, writer, uploads)
    _add_body_routes(router, writer, uploads)
    return router


def _add_session_routes(
    router: APIRouter, endpoint: ManagementEndpoint, writer: Any, uploads: Uploads
) -> None:
    @router.post(
        "/adapters/{name}/uploads",
        status_code=201,
        responses=documented(409, 422, 507, response=UploadDocument, status=201),
        openapi_extra=described(UploadBody, repeatable=True),
    )
    async def open_upload(
        name: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[UploadBody, request_model(UploadBody)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            upload = await use_cases.open_upload(uow, uploads, caller.tenant_id, name, body.declared())
            location = {"location": f"/tenant/v1/uploads/{upload.id}"}
            return ApiResponse(201, upload_response(upload, name, ()), headers=location)

        return await endpoint.perform(request, caller, work)

    @router.get("/uploads/{upload_id}", responses=documented(response=UploadDocument))
    async def show_upload(upload_id: str, caller: Annotated[Caller, writer]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            repository = UploadRepository(session, caller.tenant_id)
            upload = await repository.get(_upload_id(upload_id))
            name = await repository.adapter_name(upload)
            return ApiResponse(200, upload_response(upload, name, await repository.parts(upload.id)))

        return await endpoint.read(caller, work)

    @router.delete("/uploads/{upload_id}", status_code=204, responses=documented(409))
    async def abort_upload(upload_id: str, request: Request, caller: Annotated[Caller, writer]) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            await use_cases.abort_upload(uow, caller.tenant_id, _upload_id(upload_id))
            return ApiResponse(204)

        response = await endpoint.perform(request, caller, work)
        await uploads.discard(caller.tenant_id, _upload_id(upload_id))
        return response


def _add_body_routes(router: APIRouter, writer: Any, uploads: Uploads) -> None:
    receiver = _Receiver(uploads)

    @router.post(
        "/adapters/{name}/versions",
        status_code=202,
        responses=documented(409, 422, 507, response=AcceptedVersion, status=202),
        openapi_extra={**described(repeatable=True), "requestBody": folder_body()},
    )
    async def upload_version(name: str, request: Request, caller: Annotated[Caller, writer]) -> Response:
        return respond(ApiResponse(202, await receiver.folder(name, request, caller)))

    @router.put(
        "/uploads/{upload_id}/{file}/parts/{number}",
        responses=documented(409, 507, response=PartDocument),
        openapi_extra={"requestBody": binary_body()},
    )
    async def upload_part(
        upload_id: str, file: str, number: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        identity, part = _upload_id(upload_id), _part_number(number)
        return respond(ApiResponse(200, await receiver.part(identity, file, part, request, caller)))

    @router.post(
        "/uploads/{upload_id}/complete",
        status_code=202,
        responses=documented(409, 507, response=AcceptedVersion, status=202),
    )
    async def complete_upload(
        upload_id: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        identity, actor = _upload_id(upload_id), _actor(request, caller)
        name, version = await use_cases.complete_upload(uploads, actor, caller.tenant_id, identity)
        return respond(ApiResponse(202, accepted_version(name, version)))


class _Receiver:
    """Receives the upload bodies of one gateway."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        limits = uploads.limits
        self._limiter = TenantLimiter(
            "uploads", total=limits.max_in_flight, per_tenant=limits.max_in_flight_per_tenant
        )

    async def folder(self, name: str, request: Request, caller: Caller) -> AcceptedVersion:
        """Receive a whole adapter. The same Idempotency-Key with the same files gives the same version."""
        uploads, key = self._uploads, idempotency_key(request)
        upload_id = uuid4() if key is None else uuid5(caller.api_key_id, key)
        async with self._limiter.slot(caller.tenant_id):
            version = await use_cases.submit_folder(
                uploads,
                _actor(request, caller),
                caller.tenant_id,
                name,
                partial(self._receive_folder, request),
                size_bytes=_declared_bytes(request, uploads.max_bytes),
                upload_id=upload_id,
            )
        return accepted_version(name, version)

    async def part(
        self, upload_id: UUID, file: str, number: int, request: Request, caller: Caller
    ) -> PartDocument:
        uploads, digest = self._uploads, content_digest(request)
        async with self._limiter.slot(caller.tenant_id):
            size = await uploads.expected_size(caller.tenant_id, upload_id, file, number)
            chunks = BodyChunks(request, size, uploads.limits)
            stored = await uploads.receive_part(
                caller.tenant_id, upload_id, file, number, chunks, size=size, sha256=digest
            )
        return part_response(file, number, stored.size, stored.sha256)

    async def _receive_folder(self, request: Request, staged: Path) -> list[DeclaredFile]:
        uploads = self._uploads
        chunks = BodyChunks(request, uploads.max_bytes + FRAME_BYTES, uploads.limits)
        content_type, floor_bytes = (
            request.headers.get("content-type", ""),
            uploads.limits.storage_floor_bytes,
        )
        files = await receive_folder(chunks, content_type, staged, uploads.adapter_limits, floor_bytes)
        return [DeclaredFile(name, files[name].size, files[name].sha256) for name in sorted(files)]


def _actor(request: Request, caller: Caller) -> Actor:
    return key_actor(caller.key_id, caller.address, request_id_of(request.scope))


def _declared_bytes(request: Request, max_bytes: int) -> int:
    """Return the size of the files by the Content-Length, less what may be frame; `max_bytes` without that header."""
    declared = declared_size(request)
    return max_bytes if declared is None else max(0, min(declared - FRAME_BYTES, max_bytes))


def _upload_id(text: str) -> UUID:
    """Parse an upload id. Raises `UploadNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise UploadNotFound("no such upload")
    return parsed


def _part_number(text: str) -> int:
    """Parse a part number; 0, which no part has, for any other text."""
    return int(text) if _NUMBER.fullmatch(text) else 0
