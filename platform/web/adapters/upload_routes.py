"""Routes of uploads: a whole adapter in one multipart request, or parts that may be repeated, in any order and in parallel."""

import re
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from pydantic import PlainValidator, WithJsonSchema
from starlette.responses import Response

from loraplex.adapters.uploads import use_cases as uploads
from loraplex.platform.web.adapters.routes import Writer
from loraplex.platform.web.adapters.upload_documents import UploadBody, binary_body, folder_body
from loraplex.platform.web.adapters.upload_receiver import UploadReceiver
from loraplex.platform.web.openapi import described
from loraplex.platform.web.path_ids import PathId
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented, respond
from loraplex.tenants.errors import UploadNotFound
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.records import AcceptedVersion, PartDocument, UploadDocument

UPLOAD: Final = "/uploads/{upload_id}"
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")

router = APIRouter()


async def receiver_of(request: Request) -> UploadReceiver:
    """Return what receives the bodies of this gateway."""
    receiver: UploadReceiver = request.app.state.upload_receiver
    return receiver


def part_number(text: str) -> int:
    """Parse a part number; 0, which no part has, for any other text."""
    return int(text) if _NUMBER.fullmatch(text) else 0


Receiver = Annotated[UploadReceiver, Depends(receiver_of)]
UploadId = Annotated[UUID, PathId(UploadNotFound, "no such upload")]
PartNumber = Annotated[int, PlainValidator(part_number), WithJsonSchema({"type": "string"})]


@router.post(
    "/adapters/{name}/uploads",
    status_code=201,
    responses=documented(409, 422, 507, response=UploadDocument, status=201),
    openapi_extra=described(UploadBody, repeatable=True),
)
async def open_upload(
    request: Writer, receiver: Receiver, name: str, body: Annotated[UploadBody, request_model(UploadBody)]
) -> Response:
    def created(upload: UploadDocument) -> ApiResponse:
        return ApiResponse(201, upload, headers={"location": f"/tenant/v1/uploads/{upload.id}"})

    return await request.replying(created).run(
        uploads.open_upload, receiver.uploads, request.tenant_id, name, body.declared()
    )


@router.get(UPLOAD, responses=documented(response=UploadDocument))
async def show_upload(request: Writer, upload_id: UploadId) -> Response:
    return await request.read(queries.upload, request.tenant_id, upload_id)


@router.delete(UPLOAD, status_code=204, responses=documented(409))
async def abort_upload(request: Writer, receiver: Receiver, upload_id: UploadId) -> Response:
    response = await request.run(uploads.abort_upload, request.tenant_id, upload_id)
    await receiver.uploads.discard(request.tenant_id, upload_id)
    return response


@router.post(
    "/adapters/{name}/versions",
    status_code=202,
    responses=documented(409, 422, 507, response=AcceptedVersion, status=202),
    openapi_extra={**described(repeatable=True), "requestBody": folder_body()},
)
async def upload_version(request: Writer, receiver: Receiver, name: str) -> Response:
    return respond(ApiResponse(202, await receiver.folder(request, name)))


@router.put(
    f"{UPLOAD}/{{file}}/parts/{{number}}",
    responses=documented(409, 507, response=PartDocument),
    openapi_extra={"requestBody": binary_body()},
)
async def upload_part(
    request: Writer, receiver: Receiver, upload_id: UploadId, file: str, number: PartNumber
) -> Response:
    return respond(ApiResponse(200, await receiver.part(request, upload_id, file, number)))


@router.post(
    f"{UPLOAD}/complete",
    status_code=202,
    responses=documented(409, 507, response=AcceptedVersion, status=202),
)
async def complete_upload(request: Writer, receiver: Receiver, upload_id: UploadId) -> Response:
    accepted = await receiver.uploads.complete(request.tenant_id, upload_id, request.actor)
    return respond(ApiResponse(202, accepted))
