"""The service as operators watch it: engines, drift, health. Invariant: a part that does not answer is shown as such; the others stay."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.confirmation import Confirmation
from loraplex.platform.web.console.endpoint import is_htmx
from loraplex.platform.web.console.form_routes import FormSubmission, form_page, submits_operator
from loraplex.platform.web.console.page import PageRequest, opens_operator
from loraplex.platform.web.engine import health, use_cases
from loraplex.platform.web.engine import queries as engine
from loraplex.platform.web.engine.operator_routes import engine_number
from loraplex.platform.web.engine.queries import TenantNamespaces, tenant_shares

Operator = Annotated[PageRequest, opens_operator()]
Submission = Annotated[FormSubmission, submits_operator()]
ENGINE: Final = "/operator/console/engine"
DRIFT: Final = "/operator/console/drift"
HEALTH: Final = "/operator/console/health"

router = APIRouter()


@router.get(ENGINE)
async def show_engines(page: Operator) -> Response:
    states = await engine.engine_states(page.dependencies.engine, datetime.now(UTC))
    known = [(state.number, state.stats) for state in states if state.stats is not None]
    namespaces, shares = _namespaces(page), {}
    async with page.reading() as session:
        for number, stats in known:
            shares[number] = await tenant_shares(session, stats.tenant_steps, namespaces)
        names = await engine.adapter_names(session, states)
    managed = getattr(page.dependencies.engine, "fleet", None) is not None
    return _show(
        page, "engine/engine.html", "engines", engines=states, names=names, shares=shares, managed=managed
    )


async def add_form(page: Operator) -> dict[str, object]:
    return {}


@form_page(router, f"{ENGINE}/add", "engine/add.html", add_form, fields=("address",))
async def add_engine(submission: Submission) -> Response:
    address = submission.form.text("address").strip() or None
    number: int = await submission.result(use_cases.add, submission.dependencies.engine, address, None)
    return submission.back(ENGINE, f"Engine {number} is added.")


def _drain(number: str) -> Confirmation:
    """Raises `EngineNotFound`."""
    path = f"{ENGINE}/{engine_number(number)}/drain"
    return Confirmation(
        title=f"Drain engine {number}?",
        consequence="It takes no new request. Open ones end, or go on elsewhere after the grace, and its process ends.",
        action=path,
        verb="Drain engine",
        keep="Keep it",
        back=ENGINE,
        path=f"/engines/{number}/drain",
    )


async def drain_form(page: Operator, number: str) -> dict[str, object]:
    """Return what asks before an engine drains. Raises `EngineNotFound`."""
    return {"asked": _drain(number)}


@form_page(router, f"{ENGINE}/{{number}}/drain", "tenants/confirm.html", drain_form)
async def drain_engine(submission: Submission, number: str) -> Response:
    engine = submission.dependencies.engine
    await submission.run(use_cases.drain, engine, engine_number(number), None, force=False)
    return submission.back(ENGINE, f"Engine {number} drains.")


@router.get(DRIFT)
async def show_drift(page: Operator) -> Response:
    log = page.dependencies.admission_controller.reconciliation.log
    rows = await page.query(engine.drift_rows, log)
    tenants = {row.finding.tenant_id for row in rows}
    currencies = {tenant_id: page.dependencies.currency_of(tenant_id) for tenant_id in tenants}
    return page.show("engine/drift.html", log=log, rows=rows, currencies=currencies)


@router.get(HEALTH)
async def show_health(page: Operator) -> Response:
    storage, probes = await health.storage_health(page.dependencies.uploads), page.dependencies.health
    return _show(
        page,
        "engine/health.html",
        "parts",
        storage=storage,
        probes=probes,
        reasons=probes.reasons() if probes else [],
        dependencies=probes.dependency_states() if probes else {},
        outages=dict(probes.outages) if probes else {},
        started_at=probes.started_at if probes else None,
    )


def _show(page: PageRequest, template: str, block: str, **context: Any) -> Response:
    """Show a page, or the block of it that htmx reads again."""
    if is_htmx(page.http):
        return page.fragment(template, block, **context)
    return page.show(template, **context)


def _namespaces(page: PageRequest) -> TenantNamespaces:
    """The namespaces of this console, which are kept so that a page need not read all tenants again."""
    state = page.http.app.state
    if not hasattr(state, "tenant_namespaces"):
        state.tenant_namespaces = TenantNamespaces(page.dependencies.namespace_of)
    namespaces: TenantNamespaces = state.tenant_namespaces
    return namespaces
