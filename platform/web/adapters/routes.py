"""Routes of adapters: a named series of versions with a description."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.services import adapters
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match, if_match_or_any
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.tenants.models import Adapter
from loraplex.tenants.names import ADAPTER_NAME
from loraplex.tenants.records import UtcTime
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE
from loraplex.tenants.unit_of_work import UnitOfWork

MAX_DESCRIPTION: Final = 1000
BY_NAME: Final[SortOrder[Adapter, str]] = by_text(lambda adapter: adapter.name)


class NewAdapter(RequestModel):
    name: str = Field(pattern=ADAPTER_NAME)
    description: str = Field(default="", max_length=MAX_DESCRIPTION)


class AdapterChange(RequestModel):
    description: str = Field(max_length=MAX_DESCRIPTION)


class AdapterDocument(ResponseModel):
    """`revision` is the ETag of the adapter."""

    name: str
    description: str
    created_at: UtcTime
    revision: int


def adapters_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(ADAPTERS_READ))
    writer = Depends(authenticator.requires(ADAPTERS_WRITE))
    _add_reads(router, endpoint, reader)
    _add_creation(router, endpoint, writer)
    _add_changes(router, endpoint, writer)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, reader: Any) -> None:
    @router.get("/adapters", **listed(AdapterDocument))
    async def list_adapters(request: Request, caller: Annotated[Caller, reader]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_NAME,
            lambda session, page: AdapterRepository(session, caller.tenant_id).page(page.after, page.fetch),
            to_response,
        )

    @router.get("/adapters/{name}", responses=documented(response=AdapterDocument))
    async def get_adapter(name: str, caller: Annotated[Caller, reader]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            return api_response(await AdapterRepository(session, caller.tenant_id).get(name))

        return await endpoint.read(caller, work)


def _add_creation(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    @router.post(
        "/adapters",
        status_code=201,
        responses=documented(409, 422, response=AdapterDocument, status=201),
        openapi_extra=described(NewAdapter, repeatable=True),
    )
    async def create_adapter(
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[NewAdapter, request_model(NewAdapter)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            base_model = endpoint.served_model_name
            adapter = await adapters.create(
                uow, caller.tenant_id, body.name, body.description, base_model=base_model
            )
            location = {"location": f"/tenant/v1/adapters/{body.name}"}
            return ApiResponse(201, to_response(adapter), adapter.revision, location)

        return await endpoint.perform(request, caller, work)


def _add_changes(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    @router.patch(
        "/adapters/{name}",
        responses=documented(412, 428, response=AdapterDocument),
        openapi_extra=described(AdapterChange, if_match=True),
    )
    async def change_adapter(
        name: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[AdapterChange, request_model(AdapterChange)],
    ) -> Response:
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            return api_response(
                await adapters.describe(uow, caller.tenant_id, name, body.description, seen=seen)
            )

        return await endpoint.perform(request, caller, work)

    @router.delete(
        "/adapters/{name}",
        status_code=204,
        responses=documented(409, 412),
        openapi_extra=described(if_match=True, if_match_required=False),
    )
    async def delete_adapter(name: str, request: Request, caller: Annotated[Caller, writer]) -> Response:
        """Delete an adapter. Refused while it has an alias, one of its versions is being validated, or requests use one."""
        seen = if_match_or_any(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            await adapters.delete(uow, caller.tenant_id, name, seen=seen)
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def api_response(adapter: Adapter) -> ApiResponse:
    return ApiResponse(200, to_response(adapter), adapter.revision)


def to_response(adapter: Adapter) -> AdapterDocument:
    return AdapterDocument(
        name=adapter.name,
        description=adapter.description,
        created_at=adapter.created_at,
        revision=adapter.revision,
    )
