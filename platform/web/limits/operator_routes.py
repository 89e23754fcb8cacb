"""`/operator/v1/tenants/{id}/quotas`: the limits of a tenant. Budgets are in micro-units of money."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.services import quotas
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.limits.documents import Count, QuotaLimitFields
from loraplex.platform.web.openapi import described
from loraplex.platform.web.path_ids import tenant_id_of
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.default_limits import MAX_DEFAULT_TOKENS
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.tenant_quotas import TenantQuotas
from loraplex.tenants.unit_of_work import UnitOfWork


class TenantLimitsDocument(ResponseModel):
    """The limits of a tenant as set. Null: `max_adapters`, `max_adapter_bytes` and `max_keys` are the installation's defaults,
    `default_max_tokens` that of the tier or the installation.
    """

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    budget_per_day: int | None
    budget_per_month: int | None
    max_adapters: int | None
    max_adapter_bytes: int | None
    max_keys: int | None
    default_max_tokens: int | None


class TenantQuotaUpdate(QuotaLimitFields):
    """Fields that are absent stay unchanged. Null removes a limit, or sets one of the last four to the installation's default.
    `default_max_tokens`: of chat answers whose requests name no maximum; 0 is what the context leaves.
    """

    max_adapters: Count = None
    max_adapter_bytes: Count = None
    max_keys: Count = None
    default_max_tokens: Annotated[int | None, Field(ge=0, le=MAX_DEFAULT_TOKENS)] = None

    def named(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


def quotas_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/tenants/{tenant_id}/quotas")
    operator = Depends(authenticator.requires_operator())

    @router.get("", responses=documented(response=TenantLimitsDocument))
    async def get_quotas(tenant_id: str, caller: Annotated[OperatorCaller, operator]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            tenant = await TenantRepository(session).by_id(tenant_id_of(tenant_id))
            return api_response(*await TenantQuotas(session).get(tenant.id))

        return await endpoint.read(caller, work)

    @router.patch(
        "",
        responses=documented(412, 428, response=TenantLimitsDocument),
        openapi_extra=described(TenantQuotaUpdate, if_match=True),
    )
    async def change_quotas(
        tenant_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[TenantQuotaUpdate, request_model(TenantQuotaUpdate)],
    ) -> Response:
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            changed = await quotas.change(uow, tenant_id_of(tenant_id), body.named(), seen=seen)
            return api_response(changed.limits, changed.revision)

        return await endpoint.perform(request, caller, work)

    return router


def api_response(limits: QuotaLimits, revision: int) -> ApiResponse:
    return ApiResponse(200, TenantLimitsDocument(**dict(limits.items())), revision)
