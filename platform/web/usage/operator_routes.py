"""`/operator/v1/usage`: the usage of all tenants, or of one, and corrections, which take the usage of a request back."""

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.web.cursors import page_parameters
from loraplex.platform.web.openapi import described
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.platform.web.usage.documents import OperatorUsageDocument, UsageReportDocument
from loraplex.platform.web.usage.usage_query import USAGE_PARAMETERS
from loraplex.platform.web.usage.usage_report import answer_usage
from loraplex.tenants.ledger import use_cases as usage_corrections
from loraplex.tenants.ledger.corrections import MAX_REASON
from loraplex.tenants.ledger.usage_reports import Dimension
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.usage.records import CorrectionDocument

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


class UsageCorrection(RequestModel):
    """`request_id`: the ledger id of the request, as `GET requests` lists it."""

    request_id: UUID
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]


@router.post(
    "/usage/corrections",
    status_code=201,
    responses=documented(409, 422, response=CorrectionDocument, status=201),
    openapi_extra=described(UsageCorrection, repeatable=True),
)
async def correct_usage(
    request: Operator, body: Annotated[UsageCorrection, request_model(UsageCorrection)]
) -> Response:
    corrected: list[UUID] = []

    async def reverse(uow: UnitOfWork) -> CorrectionDocument:
        correction = await usage_corrections.reverse(uow, body.request_id, body.reason)
        corrected.append(correction.tenant_id)
        return correction

    response = await request.run(reverse)
    # After the commit; a repetition, which did not run, corrected nothing.
    for tenant_id in corrected:
        await request.dependencies.admission_controller.recount(tenant_id)
    return response
