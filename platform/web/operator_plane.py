"""The routes of `/operator/v1`. Invariant: an operator's key may use all of them, and a tenant's key none."""

from fastapi import APIRouter

from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.audit.operator_routes import audit_router
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.engine.operator_routes import engine_router
from loraplex.platform.web.invoices.credit_routes import credits_router
from loraplex.platform.web.invoices.operator_routes import invoices_router
from loraplex.platform.web.limits import operator_routes as limits
from loraplex.platform.web.rate_cards.operator_routes import rate_cards_router
from loraplex.platform.web.tenants.billing_routes import billing_router
from loraplex.platform.web.tenants.operator_routes import tenants_router
from loraplex.platform.web.usage.correction_routes import corrections_router
from loraplex.platform.web.usage.operator_routes import usage_router


def operator_router(
    dependencies: GatewayDependencies, endpoint: ManagementEndpoint, authenticator: Authenticator
) -> APIRouter:
    """Build the router of the operator plane."""
    router = APIRouter(prefix="/operator/v1", tags=["operator"])
    router.include_router(tenants_router(endpoint, authenticator))
    router.include_router(limits.router)
    router.include_router(credits_router(endpoint, authenticator))
    router.include_router(invoices_router(endpoint, authenticator))
    router.include_router(billing_router(endpoint, authenticator))
    router.include_router(rate_cards_router(endpoint, authenticator))
    router.include_router(engine_router(dependencies, authenticator))
    router.include_router(audit_router(endpoint, authenticator))
    router.include_router(usage_router(endpoint, authenticator, dependencies.currency_of))
    router.include_router(corrections_router(endpoint, authenticator, dependencies.admission_controller))
    return router
