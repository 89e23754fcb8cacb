"""`GET /tenant/v1/audit`: changes in the caller's tenant and their actors, newest first."""

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.web.cursors import Page
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.sorting import BY_ID
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.audit_records import AuditDocument
from loraplex.tenants.scopes import TENANT_ADMIN

Admin = Annotated[TenantRequest, requires(TENANT_ADMIN)]
FILTERS: Final = {
    "action": "Only this action, such as `alias.move`.",
    "target": "Only changes of this target, such as `adapters/support`.",
    "actor": "Only what the key with this public id did.",
}

router = APIRouter()


@router.get("/audit", **listed(AuditDocument, FILTERS))
async def list_audit(request: Admin) -> Response:
    page = request.page(BY_ID, FILTERS)
    return await request.listing(page, own_entries, request.tenant_id, page)


async def own_entries(
    session: AsyncSession, tenant_id: UUID, page: Page[AuditDocument, UUID]
) -> list[AuditDocument]:
    """Return the tenant's entries of one page."""
    found = await audit_entries(session, tenant_id, page.filters, page.after, page.fetch)
    return [AuditDocument.model_validate(entry) for entry in found]
