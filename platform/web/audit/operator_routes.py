"""`GET /operator/v1/audit`: changes in all tenants and outside of any tenant, newest first."""

from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.services import audit
from loraplex.platform.web.audit.documents import BY_ID, AuditedChange, fields
from loraplex.platform.web.cursors import Page
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.path_ids import filtered_tenant
from loraplex.tenants.models import AuditEntry

FILTERS: Final = {
    "action": "Only this action, such as `tenant.suspend`.",
    "target": "Only changes of this target, such as `adapters/support`.",
    "actor": "Only changes by this actor: the public id of a key, the user who ran a command, or a part of the system.",
    "tenant_id": "Only changes that concern this tenant.",
}


class OperatorAuditDocument(AuditedChange):
    """`before` and `after` hold the fields that changed. `tenant_id` is null for a change that concerns no tenant."""

    tenant_id: UUID | None


def audit_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    operator = Depends(authenticator.requires_operator())

    @router.get("/audit", **listed(OperatorAuditDocument, FILTERS))
    async def list_audit(request: Request, caller: Annotated[OperatorCaller, operator]) -> Response:
        return await endpoint.listing(request, caller, BY_ID, page_entries, to_response, FILTERS)

    return router


async def page_entries(session: AsyncSession, page: Page[AuditEntry, UUID]) -> Sequence[AuditEntry]:
    """Read the entries of one page. Raises `InvalidParameter`."""
    filters = dict(page.filters)
    tenant = filters.pop("tenant_id", None)
    tenant_id = None if tenant is None else filtered_tenant(tenant)
    return await audit.entries(session, tenant_id, filters, page.after, page.fetch)


def to_response(entry: AuditEntry) -> OperatorAuditDocument:
    return OperatorAuditDocument(**fields(entry, to_operator=True), tenant_id=entry.tenant_id)
