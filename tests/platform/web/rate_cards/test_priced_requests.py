"""A price set over HTTP applies to the requests that the counters admit from its begin on, and to none before."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select
from tests.platform.web import limited_gateway
from tests.platform.web.limited_gateway import PRICE, limited
from tests.platform.web.limits.test_routes import BODY

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.database import Database
from loraplex.tenants.models import UsageRecord

NEW = Price(prompt=11, cached_prompt=5, completion=13)


@pytest.mark.long
async def test_a_price_applies_from_its_begin_on(
    start_gateway: Any, database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database.as_operator() as session:
        first = await RateCards(session).create_first("USD", PRICE)
        operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
    assert first is not None
    book = await PriceBook.open(database)
    monkeypatch.setattr(limited_gateway, "fixed_prices", lambda _: book)
    async with limited(start_gateway, database, valkey_url) as (gateway, http):
        running = asyncio.create_task(book.run(database))
        assert (await gateway.post("/v1/completions", BODY)).status_code == 200
        created = await http.post(
            f"{gateway.url}/operator/v1/rate-cards",
            headers={"authorization": f"Bearer {operator}"},
            json={
                "scope": {"all": True},
                "currency": "USD",
                "prices": {"prompt": 11, "cached_prompt": 5, "completion": 13},
            },
        )
        begins = datetime.fromisoformat(created.json()["effective_from"])
        while datetime.now(UTC) < begins:
            assert (await gateway.post("/v1/completions", BODY)).status_code == 200
            await asyncio.sleep(0.1)
        assert (await gateway.post("/v1/completions", BODY)).status_code == 200
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with database.as_operator() as session:
        records = [*await session.scalars(select(UsageRecord).order_by(UsageRecord.admitted_at))]
    expected = [NEW if record.admitted_at >= begins else PRICE for record in records]
    ids = {PRICE: str(first.id), NEW: created.json()["id"]}
    assert {*expected} == {PRICE, NEW}
    for record, price in zip(records, expected, strict=True):
        assert str(record.price_version_id) == ids[price]
        prompt = record.uncached_tokens + record.cached_tokens
        assert record.amount_pico == price.amount_pico(prompt, record.cached_tokens, record.completion_tokens)
