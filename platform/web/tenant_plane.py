"""The routes of `/tenant/v1`.

Invariant: a resource is looked up within the caller's tenant only, in a database role that sees no other tenant. A resource
of another tenant is 404.
"""

from fastapi import APIRouter

from loraplex.platform.web.adapters import alias_routes, calibration_routes, upload_routes, version_routes
from loraplex.platform.web.adapters import routes as adapters
from loraplex.platform.web.audit import routes as audit
from loraplex.platform.web.evaluations import recording_routes
from loraplex.platform.web.evaluations import routes as evaluations
from loraplex.platform.web.invoices import routes as invoices
from loraplex.platform.web.keys import routes as keys
from loraplex.platform.web.limits import routes as limits
from loraplex.platform.web.rate_cards import routes as rate_cards
from loraplex.platform.web.team import routes as team
from loraplex.platform.web.tenants import me_routes
from loraplex.platform.web.usage import routes as usage
from loraplex.platform.web.webhooks import routes as webhooks

router = APIRouter(prefix="/tenant/v1", tags=["tenant"])
for room in (
    me_routes.router,
    keys.router,
    adapters.router,
    version_routes.router,
    calibration_routes.router,
    alias_routes.router,
    evaluations.router,
    recording_routes.router,
    audit.router,
    invoices.router,
    rate_cards.router,
    team.router,
    upload_routes.router,
    limits.router,
    usage.router,
    webhooks.router,
):
    router.include_router(room)
