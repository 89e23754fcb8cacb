"""Routes of limits: limits and their use, narrower limits of keys and adapters, explanations of refusals, threshold events."""

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.cursors import page_parameters
from loraplex.platform.web.limits.documents import ExplanationDocument, QuotaLimitFields, QuotasDocument
from loraplex.platform.web.limits.queries import BY_PLACE, quota_documents, quota_page
from loraplex.platform.web.limits.queries import explain as explain_refusal
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented, respond
from loraplex.platform.web.sorting import SortOrder, by_time
from loraplex.tenants.api_keys.use_cases import Delegated
from loraplex.tenants.quotas import queries
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.records import EventDocument, LimitsDocument
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE, KEYS_WRITE, USAGE_READ

Reader = Annotated[TenantRequest, requires(USAGE_READ)]
KeyManager = Annotated[TenantRequest, requires(KEYS_WRITE)]
AdapterReader = Annotated[TenantRequest, requires(ADAPTERS_READ)]
AdapterWriter = Annotated[TenantRequest, requires(ADAPTERS_WRITE)]
MAX_REQUEST_ID: Final = 200
BY_TIME: Final[SortOrder[EventDocument, tuple[datetime, UUID]]] = by_time(lambda event: (event.at, event.id))

router = APIRouter()


class DelegatedQuotaUpdate(QuotaLimitFields):
    """All limits of a key or an adapter. Where one is null or absent, only that of the tenant applies; a key that has limits
    itself gives them to the key that it changes.
    """

    def limits(self) -> QuotaLimits:
        return QuotaLimits(**self.model_dump())


Update = Annotated[DelegatedQuotaUpdate, request_model(DelegatedQuotaUpdate)]
NARROWED: Final = documented(404, 412, 428, response=LimitsDocument)
NARROWING: Final = described(DelegatedQuotaUpdate, if_match=True)


@router.get(
    "/quotas",
    responses=documented(response=QuotasDocument),
    openapi_extra={"parameters": page_parameters()},
)
async def list_quotas(request: Reader) -> Response:
    tenant_id, page = request.tenant_id, request.page(BY_PLACE)
    controller = request.dependencies.admission_controller
    # The counters are read in the same slot, while no connection is held.
    async with request.slot():
        async with request.session() as session:
            states, resources = await quota_page(session, tenant_id, page)
        data = await quota_documents(controller, tenant_id, page.cut(states), resources)
    currency = request.dependencies.currency_of(tenant_id)
    document = QuotasDocument(currency=currency, data=data, next_cursor=page.next(states))
    return respond(ApiResponse(200, document))


@router.get("/limits/explain/{request_id}", responses=documented(404, response=ExplanationDocument))
async def explain(request: Reader, request_id: str) -> Response:
    controller = request.dependencies.admission_controller
    found = await explain_refusal(controller, request.tenant_id, request_id[:MAX_REQUEST_ID])
    return respond(ApiResponse(200, found))


@router.get("/events", **listed(EventDocument))
async def list_events(request: Reader) -> Response:
    page = request.page(BY_TIME)
    return await request.listing(page, queries.events, request.tenant_id, page.after, page.fetch)


@router.get("/keys/{key_id}/quotas", responses=documented(404, response=LimitsDocument))
async def show_limits(request: KeyManager, key_id: str) -> Response:
    return await request.read(queries.key_limits, request.tenant_id, key_id)


@router.put("/keys/{key_id}/quotas", responses=NARROWED, openapi_extra=NARROWING)
async def narrow_limits(request: KeyManager, key_id: str, body: Update) -> Response:
    authority = Delegated(request.tenant_id, request.caller.api_key_id)
    return await request.run(quotas.narrow_key, authority, key_id, body.limits(), seen=request.if_match)


@router.get("/adapters/{name}/quotas", name="show_limits", responses=documented(404, response=LimitsDocument))
async def show_adapter_limits(request: AdapterReader, name: str) -> Response:
    return await request.read(queries.adapter_limits, request.tenant_id, name)


@router.put("/adapters/{name}/quotas", name="narrow_limits", responses=NARROWED, openapi_extra=NARROWING)
async def narrow_adapter_limits(request: AdapterWriter, name: str, body: Update) -> Response:
    return await request.run(
        quotas.narrow_adapter, request.tenant_id, name, body.limits(), seen=request.if_match
    )
