"""`GET /tenant/v1/audit`: changes in the caller's tenant and their actors, newest first."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.services import audit
from loraplex.platform.web.audit.documents import BY_ID, AuditedChange, fields
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.openapi import listed
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.scopes import TENANT_ADMIN

FILTERS: Final = {
    "action": "Only this action, such as `alias.move`.",
    "target": "Only changes of this target, such as `adapters/support`.",
    "actor": "Only what the key with this public id did.",
}


class AuditDocument(AuditedChange):
    """`before` and `after` hold the fields that changed. The address is null where an operator or the system acted."""


def audit_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    admin = Depends(authenticator.requires(TENANT_ADMIN))

    @router.get("/audit", **listed(AuditDocument, FILTERS))
    async def list_audit(request: Request, caller: Annotated[Caller, admin]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_ID,
            lambda session, page: audit.entries(
                session, caller.tenant_id, page.filters, page.after, page.fetch
            ),
            to_response,
            FILTERS,
        )

    return router


def to_response(entry: AuditEntry) -> AuditDocument:
    return AuditDocument(**fields(entry, to_operator=False))
