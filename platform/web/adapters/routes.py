"""Routes of adapters: a named series of versions with a description."""

from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.tenants.administration import adapters
from loraplex.tenants.names import ADAPTER_NAME
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.records import AdapterDocument
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE

Reader = Annotated[TenantRequest, requires(ADAPTERS_READ)]
Writer = Annotated[TenantRequest, requires(ADAPTERS_WRITE)]
MAX_DESCRIPTION: Final = 1000
BY_NAME: Final[SortOrder[AdapterDocument, str]] = by_text(lambda adapter: adapter.name)

router = APIRouter()


class NewAdapter(RequestModel):
    name: str = Field(pattern=ADAPTER_NAME)
    description: str = Field(default="", max_length=MAX_DESCRIPTION)


class AdapterChange(RequestModel):
    description: str = Field(max_length=MAX_DESCRIPTION)


@router.get("/adapters", **listed(AdapterDocument))
async def list_adapters(request: Reader) -> Response:
    page = request.page(BY_NAME)
    return await request.listing(page, queries.adapters, request.tenant_id, page)


@router.get("/adapters/{name}", responses=documented(response=AdapterDocument))
async def get_adapter(request: Reader, name: str) -> Response:
    return await request.read(queries.adapter, request.tenant_id, name)


@router.post(
    "/adapters",
    status_code=201,
    responses=documented(409, 422, response=AdapterDocument, status=201),
    openapi_extra=described(NewAdapter, repeatable=True),
)
async def create_adapter(request: Writer, body: Annotated[NewAdapter, request_model(NewAdapter)]) -> Response:
    location = {"location": f"/tenant/v1/adapters/{body.name}"}
    return await request.replying(lambda made: ApiResponse(201, made, made.revision, location)).run(
        adapters.create,
        request.tenant_id,
        body.name,
        body.description,
        base_model=request.dependencies.served_model_name,
    )


@router.patch(
    "/adapters/{name}",
    responses=documented(412, 428, response=AdapterDocument),
    openapi_extra=described(AdapterChange, if_match=True),
)
async def change_adapter(
    request: Writer, name: str, body: Annotated[AdapterChange, request_model(AdapterChange)]
) -> Response:
    return await request.run(
        adapters.describe, request.tenant_id, name, body.description, seen=request.if_match
    )


@router.delete(
    "/adapters/{name}",
    status_code=204,
    responses=documented(409, 412),
    openapi_extra=described(if_match=True, if_match_required=False),
)
async def delete_adapter(request: Writer, name: str) -> Response:
    """Delete an adapter. Refused while it has an alias, one of its versions is being validated, or requests use one."""
    return await request.run(adapters.delete, request.tenant_id, name, seen=request.if_match_or_any)
