"""`/operator/v1/tenants/{id}/billing`: the currency of a tenant, and what its bills show."""

from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.openapi import described
from loraplex.platform.web.path_ids import TenantId
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.rate_cards.documents import Currency
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.platform.web.tenants import queries
from loraplex.tenants.billing import use_cases as billing
from loraplex.tenants.billing.records import MAX_TAX_RATE_PPM, TenantBillingDocument
from loraplex.tenants.quotas.limits import MAX_BUDGET

# Line breaks are part of an address; other control characters are not.
_LINE: Final = r"^[^\x00-\x1f\x7f]*$"
_LINES: Final = r"^[^\x00-\x09\x0b-\x1f\x7f]*$"
Line = Annotated[str | None, Field(min_length=1, max_length=200, pattern=_LINE)]
Lines = Annotated[str | None, Field(min_length=1, max_length=1000, pattern=_LINES)]
NOT_NULL: Final = ("currency", "tax_rate_ppm", "minimum_micro")
Operator = Annotated[OperatorRequest, requires_operator()]

router = APIRouter(prefix="/tenants/{tenant_id}/billing")


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


@router.get("", responses=documented(response=TenantBillingDocument))
async def get_billing(request: Operator, tenant_id: TenantId) -> Response:
    return await request.read(queries.tenant_billing, tenant_id)


@router.patch(
    "",
    responses=documented(409, 412, 428, response=TenantBillingDocument),
    openapi_extra=described(TenantBillingUpdate, if_match=True),
)
async def change_billing(
    request: Operator,
    tenant_id: TenantId,
    body: Annotated[TenantBillingUpdate, request_model(TenantBillingUpdate)],
) -> Response:
    seen, fields = request.if_match, body.named()
    return await request.run(billing.change_billing, tenant_id, fields, seen=seen)
