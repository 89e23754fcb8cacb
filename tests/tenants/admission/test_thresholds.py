"""Crossing 80 and 100 percent of a day's or month's limit is told once, however many cross at the same time."""

import asyncio

from tests.tenants.admission.house import House, check_books, make_house, set_limits, usage

from loraplex.tenants.admission.admissions import Admissions
from loraplex.tenants.database import Database

EVENTS = """
    SELECT limit_name, threshold::int, used::int, limit_value::int FROM quota_events WHERE level = 'tenant'
    ORDER BY limit_name, threshold
"""


async def use_twenty_tokens(house: House, gateway: Admissions) -> None:
    admission = await gateway.admit(house.request(10, 10))
    await gateway.settle(admission, usage(admission, completion=10))


async def events(house: House) -> list[tuple[str, int]]:
    return [(row["limit_name"], row["threshold"]) for row in await house.rows(EVENTS)]


async def test_each_threshold_is_told_once(database: Database, valkey_url: str) -> None:
    house = await make_house(
        database, valkey_url, tokens_per_day=160, tokens_per_month=1000, budget_per_month=1
    )
    async with house.gateway() as first, house.gateway() as second:
        await asyncio.gather(*(use_twenty_tokens(house, first) for _ in range(6)))
        assert await events(house) == []
        await asyncio.gather(*(use_twenty_tokens(house, gateway) for gateway in (first, second)))
        assert await events(house) == [
            ("budget_per_month", 80),
            ("tokens_per_day", 80),
            ("tokens_per_day", 100),
        ]
        assert [row["used"] for row in await house.rows(EVENTS)] == [1, 140, 160] or [
            row["used"] for row in await house.rows(EVENTS)
        ] == [1, 160, 160]
        assert await check_books(house, first) == (160, 8)


async def test_a_lowered_limit_is_crossed_by_the_next_use(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request(10, 10))
        await set_limits(house, tokens_per_day=20)
        await gateway.settle(admission, usage(admission, completion=10))
        assert await events(house) == [("tokens_per_day", 80), ("tokens_per_day", 100)]
