"""`/operator/v1/rate-cards`: the prices of all tenants, as versions with effective dates.

Invariant: a price that was in force never changes; a new version follows it. A preview writes nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.services.billing import rate_cards
from loraplex.platform.web.cursors import Page, page_parameters
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import filtered_tenant
from loraplex.platform.web.rate_cards.documents import (
    BY_ID,
    BY_TENANT,
    NewRateCardBody,
    PreviewBody,
    PreviewDocument,
    RateCardDocument,
    rate_card_response,
    rated_response,
    total_response,
    version_id_of,
)
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.tenants.billing.preview import totals
from loraplex.tenants.billing.rate_cards import CardVersion, RateCards
from loraplex.tenants.unit_of_work import UnitOfWork

FILTERS: Final = {
    "id": "Only this version.",
    "tenant_id": "Only cards of this tenant and its adapters.",
    "tier": "Only cards of this tier.",
    "adapter": "Only cards of adapters of this name.",
    "currency": "Only cards in this currency.",
}


def rate_cards_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter(prefix="/rate-cards")
    operator = Depends(authenticator.requires_operator())

    @router.get("", **listed(RateCardDocument, FILTERS))
    async def list_rate_cards(request: Request, caller: Annotated[OperatorCaller, operator]) -> Response:
        return await endpoint.listing(request, caller, BY_ID, page_versions, rate_card_response, FILTERS)

    @router.post(
        "",
        status_code=201,
        responses=documented(409, 422, response=RateCardDocument, status=201),
        openapi_extra=described(NewRateCardBody, repeatable=True),
    )
    async def create_rate_card(
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[NewRateCardBody, request_model(NewRateCardBody)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> ApiResponse:
            made = await rate_cards.create(uow, body.key, body.price(), body.effective_from)
            return ApiResponse(201, rate_card_response(made))

        return await endpoint.perform(request, caller, work)

    _add_preview(router, endpoint, operator)
    return router


def _add_preview(router: APIRouter, endpoint: ManagementEndpoint, operator: object) -> None:
    @router.post(
        "/preview",
        responses=documented(response=PreviewDocument),
        openapi_extra=described(PreviewBody) | {"parameters": page_parameters()},
    )
    async def preview_rate_card(
        request: Request,
        caller: Annotated[OperatorCaller, operator],
        body: Annotated[PreviewBody, request_model(PreviewBody)],
    ) -> Response:
        page = endpoint.page(request, caller, BY_TENANT)

        async def work(session: AsyncSession) -> ApiResponse:
            found = await rate_cards.preview(session, body.key, body.price(), body.month)
            rated = found.rated
            if page.after is not None:
                rated = [each for each in rated if BY_TENANT.key(each) > page.after]
            listing = page.listing(rated, rated_response)
            document = PreviewDocument(
                month=found.month,
                totals=[*map(total_response, totals(found.rated))],
                data=listing.data,
                next_cursor=listing.next_cursor,
            )
            return ApiResponse(200, document)

        return await endpoint.read(caller, work)


async def page_versions(session: AsyncSession, page: Page[CardVersion, UUID]) -> Sequence[CardVersion]:
    """Read the versions of one page. Raises `InvalidParameter`."""
    filters: dict[str, object] = dict(page.filters)
    if "tenant_id" in page.filters:
        filters["tenant_id"] = filtered_tenant(page.filters["tenant_id"])
    if "id" in page.filters:
        filters["id"] = version_id_of(page.filters["id"])
    return await RateCards(session).page(filters, page.after, page.fetch)
