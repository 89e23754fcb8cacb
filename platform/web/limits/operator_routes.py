"""`/operator/v1/tenants/{id}/quotas`: the limits of a tenant. Budgets are in micro-units of money."""

from typing import Annotated, Any

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.limits.documents import QuotaLimitFields, limit_annotations
from loraplex.platform.web.openapi import described
from loraplex.platform.web.path_ids import TENANT_ID
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import documented
from loraplex.tenants.quotas import queries
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.quotas.limits import TENANT_ONLY
from loraplex.tenants.quotas.records import TenantLimitsDocument

Operator = Annotated[OperatorRequest, requires_operator()]

router = APIRouter(prefix="/tenants/{tenant_id}/quotas")


class TenantQuotaUpdate(QuotaLimitFields):
    """Fields that are absent stay unchanged. Null removes a limit, or sets one of the last four to the installation's default.
    `default_max_tokens`: of chat answers whose requests name no maximum; 0 is what the context leaves.
    """

    # One field for each limit: names and maxima stand in `tenants/quotas/limits.py` alone.
    __annotations__ = limit_annotations(TENANT_ONLY)

    def named(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


@router.get("", responses=documented(response=TenantLimitsDocument))
async def get_quotas(request: Operator, tenant_id: str) -> Response:
    return await request.read(queries.tenant_limits, TENANT_ID.parse(tenant_id))


@router.patch(
    "",
    responses=documented(412, 428, response=TenantLimitsDocument),
    openapi_extra=described(TenantQuotaUpdate, if_match=True),
)
async def change_quotas(
    request: Operator,
    tenant_id: str,
    body: Annotated[TenantQuotaUpdate, request_model(TenantQuotaUpdate)],
) -> Response:
    seen = request.if_match
    return await request.run(quotas.change, TENANT_ID.parse(tenant_id), body.named(), seen=seen)
