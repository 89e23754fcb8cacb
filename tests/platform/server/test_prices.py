"""The first gateway of an installation makes a rate card of its settings; later ones log that theirs have no effect."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from loraplex.platform.config import load_settings
from loraplex.platform.server.prices import ensure_first_card, open_prices
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.database import Database

PRICES: dict[str, Any] = {"price_prompt": 7, "price_completion": 9, "currency": "EUR"}


async def test_gateways_that_start_together_make_one_card(database: Database) -> None:
    settings = load_settings(PRICES)
    async with AsyncExitStack() as stack:
        opened = await asyncio.gather(*(open_prices(settings, database, stack) for _ in range(3)))
        found = {each.table.price(uuid4(), "standard", None, datetime.now(UTC)) for each in opened}
    [version] = found
    assert (version.currency, version.price) == ("EUR", settings.price)
    async with database.as_operator() as session:
        [card] = await RateCards(session).page({}, None, 10)
        [entry] = await audit_entries(session, None, {"action": "rate-card.create"}, None, 10)
    assert (card.id, entry.actor_kind, entry.actor) == (version.id, "system", "gateway")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, None),
        (PRICES, None),
        ({**PRICES, "price_prompt": 8}, ["currency", "price_completion", "price_prompt"]),
        ({"currency": "USD"}, ["currency"]),
    ],
)
async def test_settings_that_differ_later_are_logged_and_change_nothing(
    database: Database, settings: dict[str, Any], named: list[str] | None
) -> None:
    await ensure_first_card(load_settings(PRICES), database)
    with capture_logs() as logs:
        await ensure_first_card(load_settings(settings), database)
    warned = [(log["settings"], log["instead"]) for log in logs if "no effect" in log["event"]]
    assert [given for given, _ in warned] == ([] if named is None else [named])
    assert all("loraplex rate-card create" in instead for _, instead in warned)
    async with database.as_operator() as session:
        assert len(await RateCards(session).page({}, None, 10)) == 1
