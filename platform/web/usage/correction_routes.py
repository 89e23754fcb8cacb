"""`/operator/v1/usage/corrections`: takes the usage of a request back."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.services.billing import usage_corrections
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.openapi import described
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented
from loraplex.tenants.admission.controller import AdmissionController
from loraplex.tenants.ledger.corrections import MAX_REASON
from loraplex.tenants.models import UsageRecord
from loraplex.tenants.unit_of_work import UnitOfWork


class UsageCorrection(RequestModel):
    """`request_id`: the ledger id of the request, as `GET requests` lists it."""

    request_id: UUID
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]


class CorrectionDocument(ResponseModel):
    """What a correction adds to the ledger: negative tokens and a negative amount. `prompt_tokens` include `cached_tokens`;
    `amount_pico` is in pico-units of `currency`.
    """

    id: UUID
    request_id: UUID
    tenant_id: UUID
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    amount_pico: str
    currency: str


def corrections_router(
    endpoint: ManagementEndpoint, authenticator: Authenticator, controller: AdmissionController
) -> APIRouter:
    router = APIRouter(prefix="/usage/corrections")
    operator = Depends(authenticator.requires_operator())

    @router.post(
        "",
        status_code=201,
        responses=documented(409, 422, response=CorrectionDocument, status=201),
        openapi_extra=described(UsageCorrection, repeatable=True),
    )
    async def correct_usage(
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[UsageCorrection, request_model(UsageCorrection)],
    ) -> Response:
        corrected: list[UUID] = []

        async def work(uow: UnitOfWork) -> ApiResponse:
            correction = await usage_corrections.reverse(uow, body.request_id, body.reason)
            corrected.append(correction.tenant_id)
            return ApiResponse(201, correction_response(correction, body.request_id))

        response = await endpoint.perform(request, caller, work)
        for tenant_id in corrected:
            await controller.recount(tenant_id)
        return response

    return router


def correction_response(correction: UsageRecord, request_id: UUID) -> CorrectionDocument:
    return CorrectionDocument(
        id=correction.id,
        request_id=request_id,
        tenant_id=correction.tenant_id,
        reason=correction.reason or "",
        prompt_tokens=correction.uncached_tokens + correction.cached_tokens,
        cached_tokens=correction.cached_tokens,
        completion_tokens=correction.completion_tokens,
        amount_pico=str(correction.amount_pico),
        currency=correction.currency,
    )
