"""The routes of `/tenant/v1`. Invariant: a name is looked up within the caller's tenant only; what another owns is 404."""

import re
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraplex.platform.adapter_profile import profile_schema, read_profile_change
from loraplex.platform.auth import Authenticator, Caller
from loraplex.platform.plane.plane import Plane
from loraplex.platform.request_body import read_object
from loraplex.platform.services import GatewayServices
from loraplex.platform.tenant.audit import audit_router
from loraplex.platform.tenant.keys import keys_router
from loraplex.platform.tenant.me import me_router
from loraplex.tenants.adapters import AdapterRepository
from loraplex.tenants.errors import VersionNotFound
from loraplex.tenants.models import AdapterVersion

WRITE: Final = "adapters:write"
_VERSION: Final = re.compile(r"[1-9][0-9]{0,9}")


def tenant_router(services: GatewayServices, plane: Plane, authenticator: Authenticator) -> APIRouter:
    """All routes of the tenant plane."""
    router = APIRouter(prefix="/tenant/v1", tags=["tenant"])
    router.include_router(audit_router(plane, authenticator))
    router.include_router(keys_router(plane, authenticator))
    router.include_router(me_router(plane, authenticator))
    writer = Depends(authenticator.requires(WRITE))

    @router.patch("/adapters/{name}/versions/{version}", openapi_extra=profile_schema())
    async def change_version(
        name: str, version: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        namespace = services.namespace_of(caller.tenant_id)
        check_elsewhere = partial(services.preparation.check_body, namespace)
        change = await read_object(request, services.limits.body, read_profile_change, check_elsewhere)
        if not _VERSION.fullmatch(version):
            raise VersionNotFound(f"no version {version[:20]!r}: versions are numbers from 1")
        async with services.database.as_tenant(caller.tenant_id) as session:
            adapters = AdapterRepository(session, caller.tenant_id)
            record = await adapters.change_profile(name, int(version), change)
        content = msgspec.json.encode(_version_document(name, record))
        return Response(content, media_type="application/json")

    return router


def _version_document(name: str, record: AdapterVersion) -> dict[str, Any]:
    return {
        "name": name,
        "version": record.version,
        "digest": record.digest,
        "state": record.state,
        "rank": record.rank,
        "size_bytes": record.size_bytes,
        "tool_style": record.tool_style,
        "defaults": record.defaults,
        "created_at": record.created_at,
    }
