"""The service as operators watch it: engines, drift, health. Invariant: a part that does not answer is shown as such; the others stay."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.observability.health import Health
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.endpoint import ConsoleEndpoint, is_htmx
from loraplex.platform.web.engine import drift, health
from loraplex.platform.web.engine import queries as engine
from loraplex.platform.web.engine.tenant_steps import TenantNamespaces, tenant_shares

ENGINE: Final = "/operator/console/engine"
DRIFT: Final = "/operator/console/drift"
HEALTH: Final = "/operator/console/health"


def service_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the three pages."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())
    namespaces = TenantNamespaces(endpoint.dependencies.namespace_of)

    @router.get(ENGINE)
    async def show_engines(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        context = await _engines(endpoint, session, namespaces)
        if is_htmx(request):
            return endpoint.fragment(request, session, "engine/engine.html", "engines", **context)
        return endpoint.page(request, session, "engine/engine.html", **context)

    @router.get(DRIFT)
    async def show_drift(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        log = endpoint.dependencies.admission_controller.drift_log
        report = await endpoint.query(session, lambda found: drift.drift(found, log))
        currencies = {row.tenant_id: endpoint.dependencies.currency_of(row.tenant_id) for row in report.rows}
        return endpoint.page(request, session, "engine/drift.html", report=report, currencies=currencies)

    @router.get(HEALTH)
    async def show_health(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        storage = await health.storage_health(endpoint.dependencies.uploads)
        context = _probed(endpoint.dependencies.health) | {"storage": storage}
        if is_htmx(request):
            return endpoint.fragment(request, session, "engine/health.html", "parts", **context)
        return endpoint.page(request, session, "engine/health.html", **context)

    return router


async def _engines(
    endpoint: ConsoleEndpoint, session: ConsoleSession, namespaces: TenantNamespaces
) -> dict[str, Any]:
    """What the page of engines reads."""
    states = await engine.engine_states(endpoint.dependencies.engine, datetime.now(UTC))

    async def find(found: AsyncSession) -> dict[str, Any]:
        shares = {
            state.number: await tenant_shares(found, state.stats.tenant_steps, namespaces)
            for state in states
            if state.stats is not None
        }
        return {"names": await engine.adapter_names(found, states), "shares": shares}

    return {"engines": states, **await endpoint.query(session, find)}


def _probed(probes: Health | None) -> dict[str, Any]:
    """What the probes of this gateway say; nothing where none runs."""
    if probes is None:
        return {"probes": None, "reasons": [], "dependencies": {}, "outages": {}, "started_at": None}
    return {
        "probes": probes,
        "reasons": probes.reasons(),
        "dependencies": probes.dependency_states(),
        "outages": dict(probes.outages),
        "started_at": probes.started_at,
    }
