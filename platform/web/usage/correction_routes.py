"""`/operator/v1/usage/corrections`: takes the usage of a request back."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.web.openapi import described
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.tenants.ledger import use_cases as usage_corrections
from loraplex.tenants.ledger.corrections import MAX_REASON
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.usage.records import CorrectionDocument

Operator = Annotated[OperatorRequest, requires_operator()]

router = APIRouter(prefix="/usage/corrections")


class UsageCorrection(RequestModel):
    """`request_id`: the ledger id of the request, as `GET requests` lists it."""

    request_id: UUID
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]


@router.post(
    "",
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
