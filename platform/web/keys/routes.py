"""`/tenant/v1/keys`: a tenant's keys, managed with its own keys. A key of another tenant is 404."""

from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.services import api_keys
from loraplex.platform.services.api_keys import KeyAuthority, delegated_keys
from loraplex.platform.web.cursors import flag, flag_parameter
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.keys.documents import (
    KeyDocument,
    KeyPatch,
    NewKeyBody,
    NewKeyDocument,
    RotateBody,
    to_response,
)
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.sorting import SortOrder, by_time
from loraplex.tenants.api_keys.keys import IssuedKey, KeyRepository
from loraplex.tenants.models import ApiKey
from loraplex.tenants.scopes import KEYS_WRITE
from loraplex.tenants.unit_of_work import UnitOfWork

END_RUNNING: Final = (
    "Whether the key's running requests end within 2 s, on every gateway, and are billed by what was delivered; "
    "else they run on to their end."
)
BY_TIME: Final[SortOrder[ApiKey, tuple[datetime, UUID]]] = by_time(
    lambda record: (record.created_at, record.id)
)


def keys_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    writer = Depends(authenticator.requires(KEYS_WRITE))
    _add_reads(router, endpoint, writer)
    _add_issuing(router, endpoint, writer)
    _add_changes(router, endpoint, writer)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    @router.get("/keys", **listed(KeyDocument))
    async def list_keys(request: Request, caller: Annotated[Caller, writer]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_TIME,
            lambda session, page: KeyRepository(session).page(caller.tenant_id, page.after, page.fetch),
            to_response,
        )

    @router.get("/keys/{key_id}", responses=documented(response=KeyDocument))
    async def get_key(key_id: str, caller: Annotated[Caller, writer]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            return key_response(await KeyRepository(session).get(caller.tenant_id, key_id))

        return await endpoint.read(caller, work)


def _add_issuing(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    new = documented(409, 422, response=NewKeyDocument, status=201)
    rotation = described(RotateBody, optional_body=True, repeatable=True)

    @router.post(
        "/keys", status_code=201, responses=new, openapi_extra=described(NewKeyBody, repeatable=True)
    )
    async def create_key(
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[NewKeyBody, request_model(NewKeyBody)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            keys = keys_of(uow, caller)
            return new_key_response(await api_keys.create(uow, keys, body.name, body.scopes, body.bounds()))

        return await endpoint.perform(request, caller, work)

    @router.post("/keys/{key_id}/rotate", status_code=201, responses=new, openapi_extra=rotation)
    async def rotate_key(
        key_id: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[RotateBody, request_model(RotateBody, optional=True)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            keys = keys_of(uow, caller)
            return new_key_response(await api_keys.rotate(uow, keys, key_id, body.grace_seconds))

        return await endpoint.perform(request, caller, work)


def _add_changes(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    changed = documented(409, 412, 428, response=KeyDocument)

    @router.patch("/keys/{key_id}", responses=changed, openapi_extra=described(KeyPatch, if_match=True))
    async def change_key(
        key_id: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[KeyPatch, request_model(KeyPatch)],
    ) -> Response:
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            keys = keys_of(uow, caller)
            return key_response(await api_keys.change(uow, keys, key_id, body.change(), seen=seen))

        return await endpoint.perform(request, caller, work)

    @router.delete(
        "/keys/{key_id}",
        status_code=204,
        responses=documented(),
        openapi_extra=flag_parameter("end_running", END_RUNNING),
    )
    async def revoke_key(key_id: str, request: Request, caller: Annotated[Caller, writer]) -> Response:
        end_running = flag(request, "end_running")

        async def work(uow: UnitOfWork) -> ApiResponse:
            await api_keys.revoke(uow, keys_of(uow, caller), key_id, end_running=end_running)
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def keys_of(uow: UnitOfWork, caller: Caller) -> KeyAuthority:
    return delegated_keys(uow, caller.tenant_id, caller.api_key_id)


def key_response(record: ApiKey) -> ApiResponse:
    return ApiResponse(200, to_response(record), etag=record.revision)


def new_key_response(issued: IssuedKey) -> ApiResponse:
    document = NewKeyDocument(**to_response(issued.record).model_dump(), api_key=issued.plaintext)
    return ApiResponse(201, document, etag=issued.record.revision, headers={"cache-control": "no-store"})
