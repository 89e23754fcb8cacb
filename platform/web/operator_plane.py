"""The routes of `/operator/v1`. Invariant: an operator's key may use all of them, and a tenant's key none."""

from fastapi import APIRouter

from loraplex.platform.web.audit import operator_routes as audit
from loraplex.platform.web.engine import adapter_routes as busy_adapters
from loraplex.platform.web.engine import operator_routes as engine
from loraplex.platform.web.evaluations import operator_routes as suites
from loraplex.platform.web.invoices import operator_routes as invoices
from loraplex.platform.web.limits import operator_routes as limits
from loraplex.platform.web.rate_cards import operator_routes as rate_cards
from loraplex.platform.web.tenants import billing_routes
from loraplex.platform.web.tenants import operator_routes as tenants
from loraplex.platform.web.usage import operator_routes as usage

router = APIRouter(prefix="/operator/v1", tags=["operator"])
for room in (
    tenants.router,
    limits.router,
    invoices.router,
    billing_routes.router,
    rate_cards.router,
    engine.router,
    busy_adapters.router,
    audit.router,
    usage.router,
    suites.router,
):
    router.include_router(room)
