"""`GET /operator/v1/audit`: changes in all tenants and outside of any tenant, newest first."""

from typing import Annotated, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.openapi import listed
from loraplex.platform.web.path_ids import filtered_tenant
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.sorting import BY_ID
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.audit_records import OperatorAuditDocument

Operator = Annotated[OperatorRequest, requires_operator()]
FILTERS: Final = {
    "action": "Only this action, such as `tenant.suspend`.",
    "target": "Only changes of this target, such as `adapters/support`.",
    "actor": "Only changes by this actor: the public id of a key, the user who ran a command, or a part of the system.",
    "tenant_id": "Only changes that concern this tenant.",
}

router = APIRouter()


@router.get("/audit", **listed(OperatorAuditDocument, FILTERS))
async def list_audit(request: Operator) -> Response:
    page = request.page(BY_ID, FILTERS)
    filters = dict(page.filters)
    tenant = filters.pop("tenant_id", None)
    tenant_id = None if tenant is None else filtered_tenant(tenant)
    return await request.listing(
        page, audit_entries, tenant_id, filters, page.after, page.fetch, to_operator=True
    )
