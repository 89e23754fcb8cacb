"""`GET /operator/v1/audit`: what was changed in all tenants and beside them, newest first."""

from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth import Authenticator, OperatorCaller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.operator.documents import tenant_id_of
from loraplex.platform.plane.answers import Answer, Document, UtcTime, documented
from loraplex.platform.plane.openapi import described
from loraplex.platform.plane.pagination import Listing
from loraplex.platform.plane.plane import Plane
from loraplex.tenants.audit import audit_entries
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.models import AuditEntry

FILTERS: Final = {
    "action": "Only this action, such as `tenant.suspend`.",
    "target": "Only what changed this, such as `adapters/support`.",
    "actor": "Only what the key with this public id, the command or the part of the system of this name did.",
    "tenant_id": "Only what concerns this tenant.",
}


class OperatorAuditDocument(Document):
    """`before` and `after` hold the fields that changed. `tenant_id` is null for what concerns no tenant."""

    id: UUID
    at: UtcTime
    tenant_id: UUID | None
    actor_kind: str
    actor: str
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    address: str | None
    request_id: str | None


def audit_router(plane: Plane, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    operator = Depends(authenticator.requires_operator())

    @router.get(
        "/audit",
        responses=documented(answer=Listing[OperatorAuditDocument]),
        openapi_extra=described(filters=FILTERS),
    )
    async def list_audit(request: Request, caller: Annotated[OperatorCaller, operator]) -> Response:
        page = plane.page_of(request, caller, tuple(FILTERS))
        after = None if page.after is None else UUID(str(page.after[0]))
        filters = dict(page.filters)
        tenant = filters.pop("tenant_id", None)
        tenant_id = None if tenant is None else filtered_tenant(tenant)

        async def work(session: AsyncSession) -> Answer:
            rows = await audit_entries(session, tenant_id, filters, after, page.fetch)
            return Answer(200, page.listing(rows, shown, lambda row: (str(row.id),)))

        return await plane.read(caller, work)

    return router


def filtered_tenant(text: str) -> UUID:
    """Raises `InvalidParameter`."""
    try:
        return tenant_id_of(text)
    except TenantNotFound:
        raise InvalidParameter("`tenant_id` must be a UUID.", param="tenant_id") from None


def shown(entry: AuditEntry) -> OperatorAuditDocument:
    names = OperatorAuditDocument.model_fields.keys() - {"address"}
    address = None if entry.address is None else str(entry.address)
    return OperatorAuditDocument(**{name: getattr(entry, name) for name in names}, address=address)
