"""`GET /tenant/v1/usage`, from the hourly rollups, and `GET /tenant/v1/requests`, from the rows of the ledger."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.inference.sessions import chosen_session
from loraplex.platform.web.cursors import page_parameters
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.responses import documented
from loraplex.platform.web.sorting import BY_ID
from loraplex.platform.web.usage import request_queries as requests
from loraplex.platform.web.usage.documents import (
    RequestDetailDocument,
    TimelineDocument,
    UsageDocument,
    UsageReportDocument,
)
from loraplex.platform.web.usage.usage_query import REQUEST_FILTERS, USAGE_PARAMETERS, request_filters
from loraplex.platform.web.usage.usage_report import answer_usage
from loraplex.tenants.scopes import USAGE_READ
from loraplex.tenants.usage.records import RequestDocument

Reader = Annotated[TenantRequest, requires(USAGE_READ)]

router = APIRouter()


@router.get(
    "/usage",
    responses=documented(response=UsageReportDocument[UsageDocument]),
    openapi_extra={"parameters": page_parameters(USAGE_PARAMETERS)},
)
async def report_usage(request: Reader) -> Response:
    return await answer_usage(request, UsageDocument, ("adapter", "key", "class"), USAGE_PARAMETERS)


@router.get("/requests", **listed(RequestDocument, REQUEST_FILTERS))
async def list_requests(request: Reader) -> Response:
    """Finished requests, and those of the last day that were refused, newest first. A page of a filtered listing may be short, or empty, and have a next one."""
    page = request.page(BY_ID, REQUEST_FILTERS)
    session_of = partial(chosen_session, request.dependencies.derive_key, request.tenant_id)
    filters = request_filters(page.filters, request.dependencies.served_model_name, session_of)
    return await request.read(requests.listing, request.tenant_id, filters, page)


@router.get("/requests/{request_id}", responses=documented(response=RequestDetailDocument))
async def get_request(request: Reader, request_id: str) -> Response:
    """A finished or refused request by its id, or by the `x-request-id` of its response; of several, the newest."""
    return await request.read(requests.detail, request.tenant_id, request_id)


@router.get("/requests/{request_id}/timeline", responses=documented(response=TimelineDocument))
async def get_timeline(request: Reader, request_id: str) -> Response:
    """The phases of a finished request. They are kept for a shorter time than the request."""
    return await request.read(requests.timeline, request.tenant_id, request_id)
