"""`GET /tenant/v1/billing/rate-card`: the prices of the caller's requests, now and later."""

from datetime import date
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.api.management.endpoint import ManagementEndpoint
from loraplex.platform.api.management.pagination import Listing, page_parameters
from loraplex.platform.api.management.responses import ApiResponse, documented
from loraplex.platform.api.schemas.rate_cards import BY_ID, RateCardDocument, rate_card_response
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.billing.tenant_billing import TenantBillings

READ: Final = "billing:read"


class RateCardsDocument(Listing[RateCardDocument]):
    """The versions in force or to come that cover the tenant, in its currency and the next one, newest first. Of those that
    cover a request, the most specific applies. `next_currency` replaces `currency` on `next_currency_from`, at 00:00 UTC.
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
        openapi_extra={"parameters": page_parameters()},
    )
    async def list_rate_cards(request: Request, caller: Annotated[Caller, reader]) -> Response:
        page = endpoint.page(request, caller, BY_ID)

        async def work(session: AsyncSession) -> ApiResponse:
            data, _ = await TenantBillings(session).get(caller.tenant_id)
            currencies = [each for each in (data.currency, data.next_currency) if each is not None]
            versions = await RateCards(session).covering(
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
