"""The prices of a gateway: makes an installation's first rate card from the settings, and follows the cards in PostgreSQL.

Invariant: the price settings make the first card and change nothing afterwards.
"""

from contextlib import AsyncExitStack
from typing import Final

import structlog

from loraplex.platform.config import Settings
from loraplex.platform.server.start import running
from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.database import Database
from loraplex.tenants.unit_of_work import unit_of_work

PRICE_SETTINGS: Final = frozenset({"currency", "price_prompt", "price_cached_prompt", "price_completion"})
LOG = structlog.get_logger("loraplex.prices")


async def open_prices(settings: Settings, database: Database, stack: AsyncExitStack) -> PriceBook:
    """Open the gateway's prices, which `stack` closes. Raises `DatabaseUnavailable`."""
    await ensure_first_card(settings, database)
    prices = await PriceBook.open(database)
    await stack.enter_async_context(running(prices.run(database)))
    return prices


async def ensure_first_card(settings: Settings, database: Database) -> None:
    """Create the first card if there is none. Else log settings that differ from it, since they have no effect."""
    async with unit_of_work(database, system_actor("gateway"), None, None) as uow:
        made = await rate_cards.create_first(uow, settings.currency, settings.price)
    if made is not None:
        LOG.debug("the first rate card is made from the settings", **rate_cards.snapshot(made))
        return
    async with database.as_operator() as session:
        first = await RateCards(session).oldest_for_all()
    given = sorted(PRICE_SETTINGS & settings.model_fields_set)
    if (
        first is not None
        and given
        and (first.key.currency, first.price) != (settings.currency, settings.price)
    ):
        LOG.warning(
            "price settings have no effect: they only make the first rate card of an installation",
            settings=given,
            instead="`loraplex rate-card create`, or `PATCH /operator/v1/tenants/{id}/billing` for a tenant's currency",
        )
