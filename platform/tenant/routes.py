"""All routes of `/tenant/v1`. Invariant: what a path names is looked up within the caller's tenant only, by the role that
sees no other: what another owns is 404.
"""

from fastapi import APIRouter

from loraplex.platform.auth import Authenticator
from loraplex.platform.plane.plane import Plane
from loraplex.platform.services import GatewayServices
from loraplex.platform.tenant.adapters import adapters_router
from loraplex.platform.tenant.aliases import aliases_router
from loraplex.platform.tenant.audit import audit_router
from loraplex.platform.tenant.keys import keys_router
from loraplex.platform.tenant.me import me_router
from loraplex.platform.tenant.quotas import quotas_router
from loraplex.platform.tenant.uploads import uploads_router
from loraplex.platform.tenant.versions import versions_router


def tenant_router(services: GatewayServices, plane: Plane, authenticator: Authenticator) -> APIRouter:
    """All routes of the tenant plane."""
    router = APIRouter(prefix="/tenant/v1", tags=["tenant"])
    for nouns in (me_router, keys_router, adapters_router, versions_router, aliases_router, audit_router):
        router.include_router(nouns(plane, authenticator))
    router.include_router(uploads_router(plane, authenticator, services.uploads))
    router.include_router(quotas_router(plane, authenticator, services.admissions, services.currency))
    return router
