"""`/operator/v1/rate-cards`: the prices of all tenants, as versions with effective dates.

Invariant: a price that was in force never changes; a new version follows it. A preview writes nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.web.cursors import Page, page_parameters
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import filtered_tenant
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.rate_cards.documents import (
    BY_ID,
    BY_TENANT,
    NewRateCardBody,
    PreviewBody,
    PreviewDocument,
    version_id_of,
)
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import documented
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.rate_card_records import RateCardDocument, RatedUsageDocument
from loraplex.tenants.billing.rate_cards import RateCards

Operator = Annotated[OperatorRequest, requires_operator()]
FILTERS: Final = {
    "id": "Only this version.",
    "tenant_id": "Only cards of this tenant and its adapters.",
    "tier": "Only cards of this tier.",
    "adapter": "Only cards of adapters of this name.",
    "currency": "Only cards in this currency.",
}

router = APIRouter(prefix="/rate-cards")


@router.get("", **listed(RateCardDocument, FILTERS))
async def list_rate_cards(request: Operator) -> Response:
    page = request.page(BY_ID, FILTERS)
    return await request.listing(page, _versions, page)


@router.post(
    "",
    status_code=201,
    responses=documented(409, 422, response=RateCardDocument, status=201),
    openapi_extra=described(NewRateCardBody, repeatable=True),
)
async def create_rate_card(
    request: Operator, body: Annotated[NewRateCardBody, request_model(NewRateCardBody)]
) -> Response:
    return await request.run(rate_cards.create, body.key, body.price(), body.effective_from)


@router.post(
    "/preview",
    responses=documented(response=PreviewDocument),
    openapi_extra=described(PreviewBody) | {"parameters": page_parameters()},
)
async def preview_rate_card(
    request: Operator, body: Annotated[PreviewBody, request_model(PreviewBody)]
) -> Response:
    return await request.read(_preview, body, request.page(BY_TENANT))


async def _versions(session: AsyncSession, page: Page[RateCardDocument, UUID]) -> Sequence[RateCardDocument]:
    """Read the versions of one page. Raises `InvalidParameter`."""
    filters: dict[str, object] = dict(page.filters)
    if "tenant_id" in page.filters:
        filters["tenant_id"] = filtered_tenant(page.filters["tenant_id"])
    if "id" in page.filters:
        filters["id"] = version_id_of(page.filters["id"])
    return await RateCards(session).page(filters, page.after, page.fetch)


async def _preview(
    session: AsyncSession, body: PreviewBody, page: Page[RatedUsageDocument, tuple[UUID, str]]
) -> PreviewDocument:
    """Rate a month under the draft, and return one page of its tenants. Raises `InvalidField`."""
    found = await rate_cards.preview_draft(session, body.key, body.price(), body.month)
    rated = [each for each in found.rated if page.after is None or BY_TENANT.key(each) > page.after]
    return PreviewDocument(**dict(page.listing(rated)), month=found.month, totals=[*found.totals])
