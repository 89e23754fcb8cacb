"""`GET /tenant/v1/usage`, from the hourly rollups, and `GET /tenant/v1/requests`, from the rows of the ledger."""

from collections.abc import Callable
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.web.cursors import Listing, page_parameters
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.usage import request_queries as requests
from loraplex.platform.web.usage.documents import (
    BY_ID,
    RequestDetailDocument,
    RequestDocument,
    TimelineDocument,
    UsageDocument,
    UsageReportDocument,
    request_detail_response,
    request_response,
    timeline_response,
    usage_response,
)
from loraplex.platform.web.usage.usage_query import REQUEST_FILTERS, USAGE_PARAMETERS, request_filters
from loraplex.platform.web.usage.usage_report import ReportShape, answer_usage
from loraplex.tenants.ledger.request_log import RequestLog

READ: Final = "usage:read"


def usage_router(
    endpoint: ManagementEndpoint, authenticator: Authenticator, currency_of: Callable[[UUID], str]
) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(READ))

    @router.get(
        "/usage",
        responses=documented(response=UsageReportDocument[UsageDocument]),
        openapi_extra={"parameters": page_parameters(USAGE_PARAMETERS)},
    )
    async def report_usage(request: Request, caller: Annotated[Caller, reader]) -> Response:
        shape = ReportShape(
            dimensions=("adapter", "key", "class"),
            parameters=USAGE_PARAMETERS,
            tenant_of=lambda _: caller.tenant_id,
            row=UsageDocument,
            report=UsageReportDocument[UsageDocument],
            to_response=usage_response,
        )
        return await answer_usage(endpoint, request, caller, shape, currency_of)

    _add_requests(router, endpoint, authenticator)
    return router


def _add_requests(router: APIRouter, endpoint: ManagementEndpoint, authenticator: Authenticator) -> None:
    reader = Depends(authenticator.requires(READ))

    @router.get("/requests", **listed(RequestDocument, REQUEST_FILTERS))
    async def list_requests(request: Request, caller: Annotated[Caller, reader]) -> Response:
        """Finished requests, newest first. A page of a filtered listing may be short, or empty, and have a next one."""
        page = endpoint.page(request, caller, BY_ID, REQUEST_FILTERS)
        filters = request_filters(page.filters, endpoint.served_model_name)

        async def work(session: AsyncSession) -> ApiResponse:
            found = await RequestLog(session, caller.tenant_id).page(filters, page.after, page.limit)
            cursor = None if found.more_after is None else page.cursor(found.more_after)
            data = [request_response(each) for each in found.requests]
            return ApiResponse(200, Listing[RequestDocument](data=data, next_cursor=cursor))

        return await endpoint.read(caller, work)

    @router.get("/requests/{request_id}", responses=documented(response=RequestDetailDocument))
    async def get_request(request_id: str, caller: Annotated[Caller, reader]) -> Response:
        """A finished request by its id, or by the `x-request-id` of its response; of several, the newest."""

        async def work(session: AsyncSession) -> ApiResponse:
            log = RequestLog(session, caller.tenant_id)
            found = await log.get(request_id)
            met = requests.met_limits(await log.detail(found[0].id))
            return ApiResponse(200, request_detail_response(found, met))

        return await endpoint.read(caller, work)

    @router.get("/requests/{request_id}/timeline", responses=documented(response=TimelineDocument))
    async def get_timeline(request_id: str, caller: Annotated[Caller, reader]) -> Response:
        """The phases of a finished request. They are kept for a shorter time than the request."""

        async def work(session: AsyncSession) -> ApiResponse:
            phases = await requests.timeline(session, caller.tenant_id, request_id)
            return ApiResponse(200, timeline_response(phases))

        return await endpoint.read(caller, work)
