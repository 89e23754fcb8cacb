"""`GET /tenant/v1/audit`: what was changed in the caller's tenant, by whom, newest first."""

from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth import Authenticator, Caller
from loraplex.platform.plane.answers import Answer, Document, UtcTime, documented
from loraplex.platform.plane.openapi import described
from loraplex.platform.plane.pagination import Listing
from loraplex.platform.plane.plane import Plane
from loraplex.tenants.audit import audit_entries
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.scopes import TENANT_ADMIN

FILTERS: Final = {
    "action": "Only this action, such as `alias.move`.",
    "target": "Only what changed this, such as `adapters/support`.",
    "actor": "Only what the key with this public id did.",
}


class AuditDocument(Document):
    """`before` and `after` hold the fields that changed. Where an operator or the system acted, no address is told."""

    id: UUID
    at: UtcTime
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
    admin = Depends(authenticator.requires(TENANT_ADMIN))

    @router.get(
        "/audit",
        responses=documented(answer=Listing[AuditDocument]),
        openapi_extra=described(filters=FILTERS),
    )
    async def list_audit(request: Request, caller: Annotated[Caller, admin]) -> Response:
        page = plane.page_of(request, caller, tuple(FILTERS))
        after = None if page.after is None else UUID(str(page.after[0]))

        async def work(session: AsyncSession) -> Answer:
            rows = await audit_entries(session, caller.tenant_id, page.filters, after, page.fetch)
            return Answer(200, page.listing(rows, shown, lambda row: (str(row.id),)))

        return await plane.read(caller, work)

    return router


def shown(entry: AuditEntry) -> AuditDocument:
    own = entry.actor_kind == "key"
    return AuditDocument(
        id=entry.id,
        at=entry.at,
        actor_kind=entry.actor_kind,
        actor=entry.actor,
        action=entry.action,
        target=entry.target,
        before=entry.before,
        after=entry.after,
        address=str(entry.address) if own and entry.address is not None else None,
        request_id=entry.request_id,
    )
