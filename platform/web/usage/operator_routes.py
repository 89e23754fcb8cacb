"""`GET /operator/v1/usage`: the usage of all tenants, or of one."""

from collections.abc import Callable, Mapping
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.web.cursors import page_parameters
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.path_ids import filtered_tenant
from loraplex.platform.web.responses import documented
from loraplex.platform.web.usage.documents import (
    OperatorUsageDocument,
    UsageReportDocument,
    operator_usage_response,
)
from loraplex.platform.web.usage.usage_query import USAGE_PARAMETERS
from loraplex.platform.web.usage.usage_report import ReportShape, answer_usage

PARAMETERS: Final = {
    **USAGE_PARAMETERS,
    "group_by": "Any of `tenant`, `adapter`, `key` and `class`, separated by commas.",
    "tenant_id": "Only the usage of this tenant.",
}


def usage_router(
    endpoint: ManagementEndpoint, authenticator: Authenticator, currency_of: Callable[[UUID], str]
) -> APIRouter:
    router = APIRouter()
    operator = Depends(authenticator.requires_operator())
    shape = ReportShape(
        dimensions=("tenant", "adapter", "key", "class"),
        parameters=PARAMETERS,
        tenant_of=selected_tenant,
        row=OperatorUsageDocument,
        report=UsageReportDocument[OperatorUsageDocument],
        to_response=operator_usage_response,
    )

    @router.get(
        "/usage",
        responses=documented(response=UsageReportDocument[OperatorUsageDocument]),
        openapi_extra={"parameters": page_parameters(PARAMETERS)},
    )
    async def report_usage(request: Request, caller: Annotated[OperatorCaller, operator]) -> Response:
        return await answer_usage(endpoint, request, caller, shape, currency_of)

    return router


def selected_tenant(filters: Mapping[str, str]) -> UUID | None:
    """The tenant of the query; None selects all. Raises `InvalidParameter`."""
    text = filters.get("tenant_id")
    return None if text is None else filtered_tenant(text)
