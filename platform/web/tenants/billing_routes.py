"""`/operator/v1/tenants/{id}/billing`: the currency of a tenant, and what its bills show."""

from datetime import date
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.services.billing import tenant_billing
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.openapi import described
from loraplex.platform.web.path_ids import tenant_id_of
from loraplex.platform.web.rate_cards.documents import Currency
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.tenant_billing import BillingData, TenantBillings
from loraplex.tenants.models.billing import MAX_TAX_RATE_PPM
from loraplex.tenants.quotas.limits import MAX_BUDGET
from loraplex.tenants.unit_of_work import UnitOfWork

# Line breaks are part of an address; other control characters are not.
_LINE: Final = r"^[^\x00-\x1f\x7f]*$"
_LINES: Final = r"^[^\x00-\x09\x0b-\x1f\x7f]*$"
Line = Annotated[str | None, Field(min_length=1, max_length=200, pattern=_LINE)]
Lines = Annotated[str | None, Field(min_length=1, max_length=1000, pattern=_LINES)]
NOT_NULL: Final = ("currency", "tax_rate_ppm", "minimum_micro")


class TenantBillingDocument(ResponseModel):
    """`next_currency` replaces `currency` on the first day of a month, `next_currency_from`, at 00:00 UTC. `tax_rate_ppm` is in
    millionths: 190000 is 19 %. `minimum_micro`: the least amount of a month, in micro-units of the currency.
    """

    currency: str
    next_currency: str | None
    next_currency_from: date | None
    issuer: str | None
    customer_name: str | None
    customer_address: str | None
    vat_id: str | None
    tax_rate_ppm: int
    minimum_micro: int


class TenantBillingUpdate(RequestModel):
    """Fields that are absent stay unchanged, and null removes a text. Another currency begins with the next month, or at once
    for a tenant that was never used; the present one ends a change that has not begun. It changes once a month at most. `issuer` and `customer_address` may have
    several lines.
    """

    currency: Currency | None = None
    issuer: Lines = None
    customer_name: Line = None
    customer_address: Lines = None
    vat_id: Line = None
    tax_rate_ppm: Annotated[int | None, Field(ge=0, le=MAX_TAX_RATE_PPM)] = None
    minimum_micro: Annotated[int | None, Field(ge=0, le=MAX_BUDGET)] = None

    def named(self) -> dict[str, Any]:
        """Return the fields that the body names. Raises `InvalidParameter` for a null that nothing can be set to."""
        fields = {name: getattr(self, name) for name in sorted(self.model_fields_set)}
        for name in NOT_NULL:
            if name in fields and fields[name] is None:
                raise InvalidParameter(f"`{name}` must not be null.", param=name)
        return fields


def billing_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/tenants/{tenant_id}/billing")
    operator = Depends(authenticator.requires_operator())

    @router.get("", responses=documented(response=TenantBillingDocument))
    async def get_billing(tenant_id: str, caller: Annotated[OperatorCaller, operator]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            tenant = await TenantRepository(session).by_id(tenant_id_of(tenant_id))
            return api_response(*await TenantBillings(session).get(tenant.id))

        return await endpoint.read(caller, work)

    @router.patch(
        "",
        responses=documented(409, 412, 428, response=TenantBillingDocument),
        openapi_extra=described(TenantBillingUpdate, if_match=True),
    )
    async def change_billing(
        tenant_id: str,
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[TenantBillingUpdate, request_model(TenantBillingUpdate)],
    ) -> Response:
        seen, fields = if_match(request), body.named()

        async def work(uow: UnitOfWork) -> ApiResponse:
            changed = await tenant_billing.change(uow, tenant_id_of(tenant_id), fields, seen=seen)
            return api_response(changed.data, changed.revision)

        return await endpoint.perform(request, caller, work)

    return router


def api_response(data: BillingData, revision: int) -> ApiResponse:
    document = {name: getattr(data, name) for name in TenantBillingDocument.model_fields}
    return ApiResponse(200, TenantBillingDocument(**document), revision)
