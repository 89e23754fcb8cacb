"""The routes of `/operator/v1`. Invariant: an operator's key may use all of them, and a tenant's key none."""

from fastapi import APIRouter

from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.audit import operator_routes as audit
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.engine import operator_routes as engine
from loraplex.platform.web.invoices.credit_routes import credits_router
from loraplex.platform.web.invoices.operator_routes import invoices_router
from loraplex.platform.web.limits.operator_routes import quotas_router
from loraplex.platform.web.rate_cards.operator_routes import rate_cards_router
from loraplex.platform.web.tenants.billing_routes import billing_router
from loraplex.platform.web.tenants.operator_routes import tenants_router
from loraplex.platform.web.usage import correction_routes as corrections
from loraplex.platform.web.usage import operator_routes as usage


def operator_router(
    dependencies: GatewayDependencies, endpoint: ManagementEndpoint, authenticator: Authenticator
) -> APIRouter:
    """Build the router of the operator plane."""
    router = APIRouter(prefix="/operator/v1", tags=["operator"])
    router.include_router(tenants_router(endpoint, authenticator))
    router.include_router(quotas_router(endpoint, authenticator))
    router.include_router(credits_router(endpoint, authenticator))
    router.include_router(invoices_router(endpoint, authenticator))
    router.include_router(billing_router(endpoint, authenticator))
    router.include_router(rate_cards_router(endpoint, authenticator))
    router.include_router(engine.router)
    router.include_router(audit.router)
    router.include_router(usage.router)
    router.include_router(corrections.router)
    return router
