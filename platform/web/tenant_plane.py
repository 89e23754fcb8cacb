"""The routes of `/tenant/v1`.

Invariant: a resource is looked up within the caller's tenant only, in a database role that sees no other tenant. A resource
of another tenant is 404.
"""

from fastapi import APIRouter

from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.adapters.alias_routes import aliases_router
from loraplex.platform.web.adapters.routes import adapters_router
from loraplex.platform.web.adapters.upload_routes import uploads_router
from loraplex.platform.web.adapters.version_routes import versions_router
from loraplex.platform.web.audit.routes import audit_router
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.invoices.routes import invoices_router
from loraplex.platform.web.keys import routes as keys
from loraplex.platform.web.limits import routes as limits
from loraplex.platform.web.rate_cards.routes import rate_cards_router
from loraplex.platform.web.team.routes import users_router
from loraplex.platform.web.tenants.me_routes import me_router
from loraplex.platform.web.usage.routes import usage_router
from loraplex.platform.web.webhooks import routes as webhooks


def tenant_router(
    dependencies: GatewayDependencies, endpoint: ManagementEndpoint, authenticator: Authenticator
) -> APIRouter:
    """Build the router of the tenant plane."""
    router = APIRouter(prefix="/tenant/v1", tags=["tenant"])
    router.include_router(me_router(endpoint, authenticator))
    router.include_router(keys.router)
    for build_router in (
        adapters_router,
        versions_router,
        aliases_router,
        audit_router,
        invoices_router,
        rate_cards_router,
        users_router,
    ):
        router.include_router(build_router(endpoint, authenticator))
    router.include_router(uploads_router(endpoint, authenticator, dependencies.uploads))
    router.include_router(limits.router)
    router.include_router(usage_router(endpoint, authenticator, dependencies.currency_of))
    router.include_router(webhooks.router)
    return router
