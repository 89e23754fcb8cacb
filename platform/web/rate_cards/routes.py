"""`GET /tenant/v1/billing/rate-card`: the prices of the caller's requests: past, present and to come."""

from datetime import date
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.web.cursors import Listing, Page, page_parameters
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.rate_cards.documents import BY_ID, version_id_of
from loraplex.platform.web.responses import documented
from loraplex.tenants.billing.rate_card_records import RateCardDocument
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.scopes import BILLING_READ

FILTERS: Final = {
    "id": "Only this version, such as the `price_version_id` of a request; also of a former tier or currency."
}

router = APIRouter()


class RateCardsDocument(Listing[RateCardDocument]):
    """The versions that cover the tenant, in its currency and the next one, newest first: past, present and to come. Of those in
    force that cover a request, the most specific applies. `next_currency` replaces `currency` on `next_currency_from`, 00:00 UTC.
    """

    currency: str
    next_currency: str | None
    next_currency_from: date | None


@router.get(
    "/billing/rate-card",
    responses=documented(response=RateCardsDocument),
    openapi_extra={"parameters": page_parameters(FILTERS)},
)
async def list_rate_cards(request: Annotated[TenantRequest, requires(BILLING_READ)]) -> Response:
    return await request.read(_cards, request.caller, request.page(BY_ID, FILTERS))


async def _cards(
    session: AsyncSession, caller: Caller, page: Page[RateCardDocument, UUID]
) -> RateCardsDocument:
    """Read the versions that cover the caller's tenant, or the one that the filter names. Raises `InvalidParameter`."""
    filters = {name: version_id_of(text) for name, text in page.filters.items()}
    data = await TenantBillings(session).get(caller.tenant_id)
    cards = RateCards(session)
    if filters:
        versions = await cards.page(filters, page.after, page.fetch)
    else:
        currencies = [each for each in (data.currency, data.next_currency) if each is not None]
        versions = await cards.covering(caller.tenant_id, caller.tier, currencies, page.after, page.fetch)
    return RateCardsDocument(
        **dict(page.listing(versions)),
        currency=data.currency,
        next_currency=data.next_currency,
        next_currency_from=data.next_currency_from,
    )
