"""`GET /operator/v1/usage`: the usage of all tenants, or of one."""

from typing import Annotated, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.cursors import page_parameters
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.responses import documented
from loraplex.platform.web.usage.documents import OperatorUsageDocument, UsageReportDocument
from loraplex.platform.web.usage.usage_query import USAGE_PARAMETERS
from loraplex.platform.web.usage.usage_report import answer_usage
from loraplex.tenants.ledger.usage_reports import Dimension

Operator = Annotated[OperatorRequest, requires_operator()]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("tenant", "adapter", "key", "class")
PARAMETERS: Final = {
    **USAGE_PARAMETERS,
    "group_by": "Any of `tenant`, `adapter`, `key` and `class`, separated by commas.",
    "tenant_id": "Only the usage of this tenant.",
}

router = APIRouter()


@router.get(
    "/usage",
    responses=documented(response=UsageReportDocument[OperatorUsageDocument]),
    openapi_extra={"parameters": page_parameters(PARAMETERS)},
)
async def report_usage(request: Operator) -> Response:
    return await answer_usage(request, OperatorUsageDocument, DIMENSIONS, PARAMETERS)
