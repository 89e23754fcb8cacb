"""`GET /tenant/v1/billing/rate-card`: the prices of the caller's requests: past, present and to come."""

from datetime import date
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.web.cursors import Listing, page_parameters
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.rate_cards.documents import (
    BY_ID,
    RateCardDocument,
    rate_card_response,
    version_id_of,
)
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.billing.tenant_billing import TenantBillings

READ: Final = "billing:read"
FILTERS: Final = {
    "id": "Only this version, such as the `price_version_id` of a request; also of a former tier or currency."
}


class RateCardsDocument(Listing[RateCardDocument]):
    """The versions that cover the tenant, in its currency and the next one, newest first: past, present and to come. Of those in
    force that cover a request, the most specific applies. `next_currency` replaces `currency` on `next_currency_from`, 00:00 UTC.
    """

    currency: str
    next_currency: str | None
    next_currency_from: date | None


def rate_cards_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(READ))

    @router.get(
        "/billing/rate-card",
        responses=documented(response=RateCardsDocument),
        openapi_extra={"parameters": page_parameters(FILTERS)},
    )
    async def list_rate_cards(request: Request, caller: Annotated[Caller, reader]) -> Response:
        page = endpoint.page(request, caller, BY_ID, FILTERS)
        version_id = version_id_of(page.filters["id"]) if "id" in page.filters else None

        async def work(session: AsyncSession) -> ApiResponse:
            data = await TenantBillings(session).get(caller.tenant_id)
            currencies = [each for each in (data.currency, data.next_currency) if each is not None]
            cards = RateCards(session)
            if version_id is not None:
                versions = await cards.page({"id": version_id}, page.after, page.fetch)
            else:
                versions = await cards.covering(
                    caller.tenant_id, caller.tier, currencies, page.after, page.fetch
                )
            listing = page.listing(versions, rate_card_response)
            document = RateCardsDocument(
                data=listing.data,
                next_cursor=listing.next_cursor,
                currency=data.currency,
                next_currency=data.next_currency,
                next_currency_from=data.next_currency_from,
            )
            return ApiResponse(200, document)

        return await endpoint.read(caller, work)

    return router
