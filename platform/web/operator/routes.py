"""The routes of `/operator/v1`. Invariant: an operator's key may use all of them, and a tenant's key none."""

from fastapi import APIRouter

from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.operator.audit import audit_router
from loraplex.platform.web.operator.billing import billing_router
from loraplex.platform.web.operator.credits import credits_router
from loraplex.platform.web.operator.engine import engine_router
from loraplex.platform.web.operator.invoices import invoices_router
from loraplex.platform.web.operator.quotas import quotas_router
from loraplex.platform.web.operator.rate_cards import rate_cards_router
from loraplex.platform.web.operator.tenants import tenants_router
from loraplex.platform.web.operator.usage import usage_router
from loraplex.platform.web.operator.usage_corrections import corrections_router


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
    router.include_router(engine_router(dependencies, authenticator))
    router.include_router(audit_router(endpoint, authenticator))
    router.include_router(usage_router(endpoint, authenticator, dependencies.currency_of))
    router.include_router(corrections_router(endpoint, authenticator, dependencies.admission_controller))
    return router
